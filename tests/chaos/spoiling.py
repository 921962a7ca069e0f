"""Faults of files, settings and memory; each returns facts that the verdict judges."""

import asyncio
import random
import resource
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from chaos.processes import Member

from agentrl.errors import ConfigError
from agentrl.store import TrajectoryStore
from agentrl.store.documents.export_files import read_documents
from agentrl.store.repositories.transfer import read_manifest
from agentrl.trainer.checkpoint import checkpoint_paths

Facts = dict[str, Any]
SLACK_BYTES = 1 << 20
LONG_PROMPT_TOKENS, NUM_LONG_PROMPTS = 8000, 8
RECOVERY_SECONDS = 60.0
_OWN_TO_A_COPY = frozenset({"_id", "imported_policies", "turns_name_blobs"})
"""Fields of the run's document that an import sets."""


def damage_newest_checkpoint(output: Path, how: str) -> Facts | None:
    """Spoil one file of the newest of several checkpoints; None where there are fewer than two."""
    paths = checkpoint_paths(output)
    if len(paths) < 2:
        return None
    files = sorted(path for path in paths[-1].rglob("*") if path.is_file() and path.stat().st_size)
    victim = random.choice(files)
    if victim.stat().st_nlink > 1:  # the policy that was published is not the checkpoint
        whole = victim.read_bytes()
        victim.unlink()
        victim.write_bytes(whole)
    spoil(victim, how)
    return {"damaged": paths[-1].name, "intact": int(paths[-2].name), "file": victim.name}


def spoil(path: Path, how: str) -> None:
    """Change one bit of a file, or cut its end off."""
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content))
    if how == "cut":
        path.write_bytes(content[:place])
    else:
        content[place] ^= 1 << random.randrange(8)
        path.write_bytes(content)


async def exchange(store: TrajectoryStore, folder: Path, uri_of: Callable[[str], str]) -> Facts:
    """Export the run as it goes on; import it once damaged and once as it is.

    What the database's absence interrupts may be done again: each time has names of its own.
    """
    name = secrets.token_hex(4)
    intact, damaged, again = (folder / f"{name}-{what}" for what in ("intact", "damaged", "again"))
    await store.transfer.export_run(intact)
    shutil.copytree(intact, damaged)
    spoil(random.choice([one for one in sorted(damaged.iterdir()) if one.stat().st_size]), "flip")
    facts: Facts = {"is_snapshot": read_manifest(intact).is_snapshot}
    async with TrajectoryStore.connect(uri_of(f"damaged-{name}")) as copy:
        try:
            await copy.transfer.import_run(damaged)
        except ConfigError:
            facts["is_refused"] = True
        facts["left_behind"] = await copy.database.handle.list_collection_names()
    async with TrajectoryStore.connect(uri_of(f"copy-{name}")) as copy:
        await copy.transfer.import_run(intact)
        await copy.transfer.export_run(again)
        await copy.database.client.drop_database(copy.database_name)
    facts["differing"] = await asyncio.to_thread(_differing, intact, again)
    for path in (intact, damaged, again):
        shutil.rmtree(path)
    return facts


def _differing(first: Path, second: Path) -> list[str]:
    """Return the names of the collections of which two exports hold different documents."""
    one, other = read_manifest(first), read_manifest(second)
    return [
        name
        for name in sorted(one.files.keys() | other.files.keys())
        if _comparable(first, name) != _comparable(second, name)
    ]


def _comparable(folder: Path, name: str) -> list[Facts]:
    """Return documents without what an import may change: names, marks, and leases in the future."""
    found = []
    for document in read_documents(folder / f"{name}.jsonl"):
        given = {k: v for k, v in document.items() if k not in ("heartbeat_at", "lease")}
        if name == "runs":
            given = {k: v for k, v in given.items() if k not in _OWN_TO_A_COPY}
            for lease in given.get("trainer_leases", {}).values():
                lease.pop("expires_at")
        found.append(given)
    return found


async def with_little_memory(engine: Member, url: str, seconds: float) -> Facts:
    """Limit an engine's address space to what it has and hardly more, and ask much of it."""
    async with httpx.AsyncClient(base_url=url, timeout=RECOVERY_SECONDS) as client:
        assert await _until_answering(client), "the engine was away before its memory was"
    pid, log_bytes = engine.process.pid, engine.log.stat().st_size
    assert pid is not None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SLACK_BYTES
    infinite = resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, infinite))
    async with httpx.AsyncClient(base_url=url, timeout=RECOVERY_SECONDS) as client:
        asking = [asyncio.create_task(_ask(client, n)) for n in range(NUM_LONG_PROMPTS)]
        await asyncio.sleep(seconds)
        if engine.process.exitcode is None:
            resource.prlimit(pid, resource.RLIMIT_AS, (infinite, infinite))
        else:  # whoever supervises it starts it again
            engine.start()
        answers = await asyncio.gather(*asking)
        recovered = await _until_answering(client)
    return {
        "answers": answers,
        "has_died": engine.process.pid != pid,
        "is_recovered": recovered,
        "log_bytes": engine.log.stat().st_size - log_bytes,
    }


async def _ask(client: httpx.AsyncClient, number: int, num_tokens: int = LONG_PROMPT_TOKENS) -> int:
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    given = {"input_ids": [5 + number] * num_tokens, "sampling_params": sampling}
    try:
        return (await client.post("/generate", json=given)).status_code
    except httpx.HTTPError:
        return 0


async def _until_answering(client: httpx.AsyncClient) -> bool:
    try:
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await _ask(client, 0, 20) != 200:
                await asyncio.sleep(0.2)
    except TimeoutError:
        return False
    return True
