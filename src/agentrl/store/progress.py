"""How far the run is, in one small value for displays."""

from pydantic import Field

from agentrl.errors import StoreError
from agentrl.schema import RecordStatus
from agentrl.schema.base import Value
from agentrl.store.door import operation
from agentrl.store.ledger import DEFAULT_CONSUMER, LedgerDoor


class Progress(Value):
    """Counts of a run. Training and evaluation are told apart by the sign of `order`."""

    policy_version: int
    admitted_groups: int
    records: dict[RecordStatus, int] = Field(default_factory=dict)
    """Training records by status; a status without records is left out."""
    eval_records: dict[RecordStatus, int] = Field(default_factory=dict)
    """Evaluation records by status."""
    num_groups: int = 0
    num_groups_completed: int = 0
    num_groups_ready: int = 0
    """Complete groups that no trainer has touched."""
    num_groups_consumed: int = 0
    num_samplers: int = 0
    """Samplers that ever registered."""
    num_output_tokens: int = 0
    """Tokens sampled so far, as the samplers last reported."""


class ProgressDoor(LedgerDoor):
    """Counts."""

    @operation("read progress")
    async def progress(self, consumer: str = DEFAULT_CONSUMER) -> Progress:
        """Return the counts of the run.

        Raises:
            StoreError: there is no run.
        """
        run = await self._runs.find_one({}, {"config": 0})
        if run is None:
            raise StoreError(f"database {self.database_name!r} holds no run yet")
        train = {"split": "train"}
        cursor = await self._samplers.aggregate(
            [
                {
                    "$group": {
                        "_id": None,
                        "num": {"$sum": 1},
                        "tokens": {"$sum": "$num_output_tokens"},
                    }
                }
            ]
        )
        sampled = next(iter(await cursor.to_list()), {"num": 0, "tokens": 0})
        return Progress(
            policy_version=run["policy_version"],
            admitted_groups=run["admitted_groups"],
            records=await self._count_by_status({"$gte": 0}),
            eval_records=await self._count_by_status({"$lt": 0}),
            num_groups=await self._tasks.count_documents(train),
            num_groups_completed=await self._tasks.count_documents(
                {**train, "status": "completed"}
            ),
            num_groups_ready=await self.num_ready_groups(consumer),
            num_groups_consumed=await self.consumed_groups(consumer),
            num_samplers=sampled["num"],
            num_output_tokens=sampled["tokens"],
        )

    async def _count_by_status(self, order: dict[str, int]) -> dict[RecordStatus, int]:
        statuses: tuple[RecordStatus, ...] = ("pending", "running", "finished", "scored", "failed")
        counts = {
            status: await self._records.count_documents({"status": status, "order": order})
            for status in statuses
        }
        return {status: count for status, count in counts.items() if count}
