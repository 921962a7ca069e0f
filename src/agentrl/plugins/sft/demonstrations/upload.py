"""Upload demonstrations into a database, for `agentrl sft --records_of` and `agentrl inspect`.

Subclass `Uploader` and return the requests and responses of an item of the data files. Every item
becomes a Task with one finished Record, through the same writes as a rollout.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table

from agentrl.datasets.entries import BadEntry, read_entries
from agentrl.errors import ConfigError, DatasetError, RenderError, StoreError
from agentrl.models.checkpoints.resolve import resolve_tokenizer
from agentrl.plugins.sft.demonstrations.demonstration import Demonstration, demonstration_turns
from agentrl.renderers.renderer import Renderer
from agentrl.schema import DispatchedSamplingTask, MCPTask, Message, Record, Run, Score, Split
from agentrl.schema.task import id_of_task
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_OWNER = "uploader"
_LEASE_SECONDS = 60.0
_SPLITS: tuple[Split, ...] = ("train",)
SCORER = "uploaded"
Exchange = tuple[Mapping[str, Any], Message]
"""A chat request (`messages`, perhaps `tools`) and the assistant message that answered it."""


@dataclass(frozen=True)
class UploadConfig:
    """Source and destination of an upload."""

    model_name: str
    """Model whose template and tokenizer render the demonstrations: a directory or hub id."""
    data_files: Sequence[str | Path]
    """Files of items: JSONL, JSON, CSV or Parquet."""
    mongo_connection_url: str
    mongo_db_name: str
    """Name of the run that the database will belong to."""
    chunk_size: int = 128
    """Items per group of writes."""
    task_description: str = ""


@dataclass
class UploadReport:
    """The items of an upload and their outcomes."""

    rows: list["UploadedRow"] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table with a row for every item, and the sums."""
        done = [row for row in self.rows if row.record_id]
        table = Table(title=f"{len(done)} of {len(self.rows)} items uploaded", show_footer=True)
        table.add_column("item", footer="sum")
        table.add_column("record", footer=str(len(done)))
        for name in ("turns", "prompt tokens", "learned tokens"):
            attribute = f"num_{name.replace(' ', '_')}"
            total = sum(getattr(row, attribute) for row in self.rows)
            table.add_column(name, justify="right", footer=str(total))
        for row in self.rows:
            table.add_row(
                row.item,
                row.record_id or f"skipped: {row.reason}",
                *map(str, (row.num_turns, row.num_prompt_tokens, row.num_learned_tokens)),
            )
        return table


@dataclass(frozen=True)
class UploadedRow:
    """The outcome of one item."""

    item: str
    """File, and the item's place in it."""
    record_id: str = ""
    reason: str = ""
    """Why the item was left out, if it was."""
    num_turns: int = 0
    num_prompt_tokens: int = 0
    num_learned_tokens: int = 0


class Uploader(ABC):
    """Turns items of data files into Records.

    Example:
        class Math(Uploader):
            def req_and_resp(self, item):
                question = {"messages": [{"role": "user", "content": item["problem"]}]}
                return [(question, {"role": "assistant", "content": item["solution"]})]

        report = asyncio.run(Math(config).upload())
        rich.print(report.table())
    """

    def __init__(self, config: UploadConfig) -> None:
        """Load the model's tokenizer and template.

        Raises:
            ConfigError: they cannot be found.
        """
        self.config = config
        self.renderer = Renderer.load(resolve_tokenizer(config.model_name))

    @abstractmethod
    def req_and_resp(self, item: Any) -> list[Exchange]:
        """Return the model calls of an item, in order.

        A request whose messages extend the previous request and response continues that context;
        any other request starts a new one.
        """

    def validate_task(self, item: Any) -> bool:
        """Return whether to upload an item."""
        return True

    def score(self, item: Any) -> float:
        """Return the item's score; by default every demonstration is right."""
        return 1.0

    async def upload(self) -> UploadReport:
        """Upload all items; items that were uploaded before are unchanged.

        Raises:
            ConfigError: the database belongs to a run with slots that are still to be sampled.
            DatasetError: a file is missing or has an unreadable entry.
            StoreError: the store failed.
        """
        config = self.config
        report = UploadReport()
        async with TrajectoryStore.connect(
            config.mongo_connection_url, config.mongo_db_name
        ) as store:
            await store.ensure_schema()
            if await store.runs.get() is None:
                await store.runs.create(Run(name=config.mongo_db_name))
            await _refuse_open_slots(store)
            items = self._items()
            while chunk := list(islice(items, config.chunk_size)):
                await self._write(store, chunk, report)
                logger.info("%d items read", len(report.rows))
        return report

    def _items(self) -> Iterator[tuple[str, Any]]:
        for path in map(Path, self.config.data_files):
            for where, item in read_entries(path):
                if isinstance(item, BadEntry):
                    raise DatasetError(f"{path}: {where}: {item}")
                yield f"{path.stem}/{where.replace(' ', '')}", item

    async def _write(
        self, store: TrajectoryStore, chunk: Sequence[tuple[str, Any]], report: UploadReport
    ) -> None:
        tasks: dict[str, tuple[MCPTask, str, Any, float]] = {}
        for name, item in chunk:
            if not self.validate_task(item):
                report.rows.append(UploadedRow(name, reason="rejected by validate_task"))
                continue
            exchanges = self.req_and_resp(item)
            try:
                self._turns(exchanges, "check/0/0", "check/0", 1)
            except RenderError as error:
                report.rows.append(UploadedRow(name, reason=str(error)))
                continue
            value = self.score(item)
            if not math.isfinite(value):
                report.rows.append(
                    UploadedRow(name, reason=f"its score is {value}, not a finite number")
                )
                continue
            task = self._task(name, exchanges)
            if await store.tasks.get(task.id) is not None:
                report.rows.append(UploadedRow(name, reason="uploaded before"))
                continue
            tasks[task.id] = (task, name, item, value)
        await store.tasks.add([task for task, *_ in tasks.values()])
        admitted_groups = await store.tasks.next_train_order()
        for _ in tasks:
            claimed = await store.records.claim(
                _OWNER,
                lease_seconds=_LEASE_SECONDS,
                admitted_groups=admitted_groups,
                max_attempts=1,
                splits=_SPLITS,
            )
            if claimed is None or claimed[1].id not in tasks:
                raise StoreError("another process is claiming the slots of this database")
            record = claimed[0]
            _, name, item, value = tasks[record.task_id]
            score = Score(scorer=SCORER, value=value, detail=name)
            report.rows.append(await self._finish(store, record, item, score))

    async def _finish(
        self, store: TrajectoryStore, record: Record, item: Any, score: Score
    ) -> UploadedRow:
        """Write the turns of a claimed slot, its end and its score."""
        exchanges = self.req_and_resp(item)
        turns = self._turns(exchanges, record.id, record.task_id, record.fence)
        for turn in turns:
            await store.turns.append(turn, record.fence)
        await store.records.finish(
            record.id,
            record.fence,
            outcome="answered",
            final_answer=str(exchanges[-1][1].get("content") or ""),
            lease_seconds=_LEASE_SECONDS,
        )
        await store.scores.set(record.id, record.fence, score)
        return UploadedRow(
            item=score.detail,
            record_id=record.id,
            num_turns=len(turns),
            num_prompt_tokens=sum(len(turn.added_ids) for turn in turns),
            num_learned_tokens=sum(len(turn.output_ids) for turn in turns if turn.trainable),
        )

    def _turns(
        self, exchanges: Sequence[Exchange], record_id: str, task_id: str, fence: int
    ) -> list[DispatchedSamplingTask]:
        """Return all exchanges as turns; contexts that do not continue each other are roots."""
        turns: list[DispatchedSamplingTask] = []
        for conversation in _conversations(exchanges):
            offset = len(turns)
            for turn in demonstration_turns(
                conversation, self.renderer, record_id=record_id, task_id=task_id, fence=fence
            ):
                index = offset + turn.index
                turns.append(
                    turn.model_copy(
                        update={
                            "id": f"{record_id}/{fence}/{index}",
                            "index": index,
                            "parent": None if turn.parent is None else offset + turn.parent,
                        }
                    )
                )
        return turns

    def _task(self, name: str, exchanges: Sequence[Exchange]) -> MCPTask:
        messages = exchanges[0][0]["messages"]
        questions = [m.get("content") for m in messages if m.get("role") == "user"]
        return MCPTask(
            id=id_of_task("train", 0, name),
            num_generations=1,
            description=self.config.task_description,
            query=questions[-1] if questions and isinstance(questions[-1], str) else "",
            scorer=SCORER,
            dataset_id=name,
        )


def _conversations(exchanges: Sequence[Exchange]) -> list[Demonstration]:
    """Return exchanges as conversations in which only the responses are learned."""
    if not exchanges:
        raise RenderError("the item has no model call")
    found: list[tuple[list[Message], tuple[dict[str, Any], ...]]] = []
    for request, response in exchanges:
        request_messages = [_context(message) for message in request["messages"]]
        tools = tuple(request.get("tools") or ())
        answer = {**response, "role": "assistant", "weight": 1}
        if found and tools == found[-1][1] and _continues(found[-1][0], request_messages):
            found[-1][0].extend([*request_messages[len(found[-1][0]) :], answer])
        else:
            found.append(([*request_messages, answer], tools))
    return [Demonstration("", tuple(messages), tools) for messages, tools in found]


def _context(message: Message) -> Message:
    return {**message, "weight": 0} if message.get("role") == "assistant" else dict(message)


def _continues(previous: Sequence[Message], current: Sequence[Message]) -> bool:
    def plain(messages: Sequence[Message]) -> list[Message]:
        return [{k: v for k, v in message.items() if k != "weight"} for message in messages]

    return len(current) > len(previous) and plain(current[: len(previous)]) == plain(previous)


async def _refuse_open_slots(store: TrajectoryStore) -> None:
    if await store.tasks.count(split="train", status="created"):
        raise ConfigError(f"{store.redacted_uri} has pending slots; upload to a separate database")
