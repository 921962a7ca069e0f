"""The processes around the store: published policies, the servers that serve them, the samplers."""

from collections.abc import Sequence

from pymongo import ReturnDocument

from agentrl.errors import StoreError
from agentrl.schema import InferenceService, Policy, Run, SamplerInfo, ServerLoad, ServiceStatus
from agentrl.schema.lost_versions import LostVersions, version_of
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import (
    Document,
    encode,
    from_document,
    require,
    to_document,
    without_none,
)
from agentrl.store.documents.expressions import after
from agentrl.store.repositories.liveness import ALIVE_SECONDS


class PolicyRepository(Repository):
    """Publishes weights, and keeps them while servers read them.

    Versions that were imported with the run are kept, but not returned to those who would read
    their files.
    """

    @operation("publish a policy")
    async def publish(self, policy: Policy) -> None:
        """Store a policy and make it the version that servers are expected to serve.

        A trainer that resumes from it publishes a version again; lost ones keep their documents.
        """
        # The document is written before the pointer to it, so a server that reads the run's version
        # finds it.
        document = to_document(policy)
        await self._db.policies.replace_one({"_id": policy.version}, document, upsert=True)
        of_others = {"imported_policies": policy.version}
        await self._db.runs.update_one(of_others, {"$pull": of_others})
        result = await self._db.runs.update_one(
            {},
            {"$set": {"policy_version": policy.version}, "$currentDate": {"updated_at": True}},
        )
        if result.matched_count == 0:
            raise self._db.no_run()

    @operation("store a policy's checksum")
    async def set_checksum(self, version: int, checksum: str) -> None:
        """Add the checksum to a published version; no effect if it was removed meanwhile."""
        await self._db.policies.update_one({"_id": version}, {"$set": {"checksum": checksum}})

    @operation("store that a policy is written")
    async def mark_written(self, version: int, num_bytes: int) -> None:
        """Mark the files of a published version as written; no effect if it was removed."""
        written = {"is_written": True, "num_bytes": num_bytes}
        await self._db.policies.update_one({"_id": version}, {"$set": written})

    @operation("read the latest policy")
    async def latest(self) -> Policy | None:
        """Return the policy that servers are expected to serve, None before the first."""
        run = await self._db.runs.find_one({}, {"policy_version": 1, "imported_policies": 1})
        if run is None or run["policy_version"] in _imported(run):
            return None
        document = await self._db.policies.find_one({"_id": run["policy_version"]})
        return None if document is None else from_document(Policy, document)

    @operation("hold the latest policy")
    async def hold_latest(self, seconds: float) -> Policy | None:
        """Return the policy that servers are expected to serve, None before the first.

        Its files are kept for at least `seconds`.
        """
        # A publisher that removes old versions reads `held_versions` after publishing a later one.
        # Hold first, then check again: either the publisher sees the hold, or this process sees the
        # later version.
        policy = await self.latest()
        while policy is not None:
            until = {"$max": ["$held_until", after(seconds)]}
            await self._db.policies.update_one(
                {"_id": policy.version}, [{"$set": {"held_until": until}}]
            )
            latest = await self.latest()
            if latest is None or latest.version == policy.version:
                return latest
            policy = latest
        return None

    @operation("read held policies")
    async def held_versions(self) -> set[int]:
        """Return the versions whose files a server may be reading."""
        held = {"$expr": {"$gt": ["$held_until", "$$NOW"]}}
        return {int(document["_id"]) async for document in self._db.policies.find(held, {"_id": 1})}

    @operation("read a policy")
    async def get(self, version: int) -> Policy | None:
        """Return a published policy; None if it does not exist or was removed."""
        document = await self._db.policies.find_one({"_id": version})
        return None if document is None else from_document(Policy, document)

    @operation("read the policy of a step")
    async def of_step(self, step: int) -> Policy | None:
        """Return the policy that a step made; None if it does not exist or was removed."""
        return await self.get(version_of(step, await lost_versions(self._db)))

    @operation("read policies")
    async def all(self) -> list[Policy]:
        """Return all policies that were published here, by version."""
        run = await self._db.runs.find_one({}, {"imported_policies": 1})
        found = self._db.policies.find({"_id": {"$nin": _imported(run or {})}}).sort("_id", 1)
        return [from_document(Policy, document) async for document in found]


async def lost_versions(database: RunDatabase) -> Sequence[LostVersions]:
    """Return the lost versions of the run."""
    document = await database.runs.find_one({}, {"lost_versions": 1})
    return () if document is None else from_document(Run, document).lost_versions


def _imported(run: Document) -> list[int]:
    return run.get("imported_policies") or []


class ServiceRepository(Repository):
    """Registers inference servers."""

    @operation("register an inference server")
    async def register(self, service: InferenceService) -> None:
        """Store a server's registration, replacing that of the same id."""
        await self._db.services.replace_one({"_id": service.id}, to_document(service), upsert=True)

    @operation("send a server's heartbeat")
    async def heartbeat(
        self,
        service_id: str,
        *,
        load: ServerLoad | None = None,
        error: str | None = None,
    ) -> InferenceService:
        """Report that a server is alive, its load, and a new error (None: unchanged).

        Raises:
            StoreError: the server is not registered.
        """
        changes = {"load": None if load is None else load.model_dump()}
        changes |= without_none(error=encode(error))
        update: Document = {"$currentDate": {"heartbeat_at": True}, "$set": changes}
        return await self._change_service(service_id, update)

    @operation("set a server's status")
    async def set_status(
        self,
        service_id: str,
        *,
        status: ServiceStatus,
        policy_version: int | None = None,
        adapter: str | None = None,
        error: str | None = None,
    ) -> InferenceService:
        """Change a server's status from another process; its heartbeat is unchanged.

        Raises:
            StoreError: the server is not registered.
        """
        changes = without_none(policy_version=policy_version, adapter=adapter)
        changes |= {"status": status, "error": encode(error)}
        return await self._change_service(service_id, {"$set": changes})

    @operation("claim a sleeping server")
    async def claim_sleeping(self, service_id: str) -> bool:
        """Make a sleeping server `updating`; False if it is not asleep.

        Only the caller that gets True may wake it: waking a server twice crashes it.
        """
        result = await self._db.services.update_one(
            {"_id": service_id, "status": "asleep"}, {"$set": {"status": "updating"}}
        )
        return result.modified_count == 1

    async def _change_service(self, service_id: str, update: Document) -> InferenceService:
        document = await self._db.services.find_one_and_update(
            {"_id": service_id}, update, return_document=ReturnDocument.AFTER
        )
        if document is None:
            raise StoreError(f"inference server {service_id!r} is not registered")
        return from_document(InferenceService, document)

    @operation("read inference servers")
    async def all(self, *, alive_within: float | None = None) -> list[InferenceService]:
        """Return the registered servers by id.

        Args:
            alive_within: leave out servers whose last heartbeat is more seconds ago.
        """
        found = self._db.services.find(_alive(alive_within)).sort("_id", 1)
        return [from_document(InferenceService, document) async for document in found]


class SamplerRepository(Repository):
    """Registers sampler processes."""

    @operation("register a sampler")
    async def register(self, sampler: SamplerInfo) -> None:
        """Store a sampler's registration."""
        await self._db.samplers.replace_one({"_id": sampler.id}, to_document(sampler), upsert=True)

    @operation("send a sampler's heartbeat")
    async def heartbeat(self, sampler: SamplerInfo) -> SamplerInfo:
        """Store what a sampler reports about itself now, and return what is stored."""
        changes = to_document(sampler)
        for field in ("_id", "cordoned_by", "started_at", "heartbeat_at"):
            del changes[field]
        document = await self._db.samplers.find_one_and_update(
            {"_id": sampler.id},
            {
                "$set": changes,
                "$setOnInsert": {"started_at": sampler.started_at},
                "$currentDate": {"heartbeat_at": True},
            },
            upsert=True,
            return_document=ReturnDocument.AFTER,
        )
        self._db.clock.beat()
        return from_document(SamplerInfo, require(document, f"sampler {sampler.id}"))

    @operation("count samplers")
    async def count_working(self, *, claiming: bool = False) -> int:
        """Return how many samplers have reported lately and have not ended.

        Args:
            claiming: count only those that may claim rollouts.
        """
        working: Document = {**_alive(ALIVE_SECONDS), "status": {"$ne": "stopped"}}
        if claiming:
            working |= {"status": "sampling", "cordoned_by": "", "generates": {"$ne": False}}
        return int(await self._db.samplers.count_documents(working))

    @operation("cordon samplers")
    async def cordon(self, name: str, by: str) -> list[str]:
        """Tell samplers to claim nothing more, or, with an empty `by`, to claim again.

        Args:
            name: the id of a sampler, or its host, or `host:pid`.
            by: who does it.

        Returns:
            The ids of the samplers, which read it with their next heartbeat.

        Raises:
            StoreError: no sampler at work has that name.
        """
        found = [one.id for one in await self.all(alive_within=ALIVE_SECONDS)]
        named = [one for one in found if one == name or one.startswith(f"{name}:")]
        if not named:
            at_work = ", ".join(found) or "none"
            raise StoreError(f"no sampler at work is named {name!r}; at work: {at_work}")
        await self._db.samplers.update_many({"_id": {"$in": named}}, {"$set": {"cordoned_by": by}})
        return named

    @operation("read samplers")
    async def all(self, *, alive_within: float | None = None) -> list[SamplerInfo]:
        """Return the samplers by id; `alive_within` as for servers."""
        found = self._db.samplers.find(_alive(alive_within)).sort("_id", 1)
        return [from_document(SamplerInfo, document) async for document in found]


def _alive(alive_within: float | None) -> Document:
    if alive_within is None:
        return {}
    age = {"$subtract": ["$$NOW", "$heartbeat_at"]}
    return {"$expr": {"$lte": [age, round(alive_within * 1000)]}}
