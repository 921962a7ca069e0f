"""Conversations of a run as files: chat-format JSONL, or a Hugging Face dataset.

Input: a store. Output: a folder with one file per split. The JSONL rows are readable by `agentrl
sft` and by tools for OpenAI's fine-tuning format; the dataset has the same rows in Parquet, and a
card.
"""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.renderers.reply import Reply, parse_reply
from agentrl.renderers.thinking import THINK_CLOSE, THINK_OPEN
from agentrl.renderers.tool_calls.call_format_registry import all_tool_call_formats
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.schema import DispatchedSamplingTask, MCPTask, Message, Record, Task
from agentrl.schema.turn import CONTINUING
from agentrl.store import TrajectoryStore

ConversationFormat = Literal["chat", "dataset"]
_BATCH_ROWS = 256
_SCALARS = {
    "id": "string",
    "record": "string",
    "task": "string",
    "outcome": "string",
    "answer": "string",
    "reference": "string",
    "score": "double",
    "scorer": "string",
    "min_version": "int64",
    "max_version": "int64",
    "tools": "string",
}
"""Columns of the dataset in addition to `messages`, with the Arrow names of their types."""


async def export_conversations(
    store: TrajectoryStore, folder: Path, format_: ConversationFormat
) -> dict[str, int]:
    """Write the conversations of all ended records; return how many each split has.

    Args:
        store: the run.
        folder: output folder, which must not exist.
        format_: `chat` for JSONL, `dataset` for Parquet with a card.

    Raises:
        ConfigError: the folder exists, or pyarrow is missing.
        WriteError: the folder cannot be written.
    """
    if await asyncio.to_thread(folder.exists):
        raise ConfigError(f"{folder} already exists; choose a new folder")
    open_writer: Callable[[Path, str], _JsonLines | _ParquetRows]
    open_writer = _JsonLines if format_ == "chat" else _ParquetRows
    counts: dict[str, int] = {}
    with atomic_directory(folder) as staging, ExitStack() as stack:
        writers: dict[str, _JsonLines | _ParquetRows] = {}
        async for split, row in _rows(store):
            if split not in writers:
                opened = open_writer(staging, split)
                stack.callback(opened.close)
                writers[split] = opened
            writers[split].write(row)
            counts[split] = counts.get(split, 0) + 1
        stack.close()
        if format_ == "dataset":
            (staging / "README.md").write_text(_card(store.database_name, counts), "utf-8")
    return counts


async def _rows(store: TrajectoryStore) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the split and the row of every conversation."""
    task: Task | None = None
    async for record in store.records.find():
        if record.outcome is None:
            continue
        if task is None or task.id != record.task_id:
            task = await store.tasks.get(record.task_id)
        turns = await store.turns.of_record(record.id)
        for number, (messages, tools) in enumerate(conversations_of(turns)):
            yield (
                record.split,
                {
                    "id": record.id if number == 0 else f"{record.id}#{number}",
                    "messages": messages,
                    **({"tools": tools} if tools else {}),
                    **_facts(record, task),
                },
            )


def _facts(record: Record, task: Task | None) -> dict[str, Any]:
    return {
        "record": record.id,
        "task": record.task_id,
        "outcome": record.outcome,
        "answer": record.final_answer,
        "reference": task.answer if isinstance(task, MCPTask) else None,
        "score": None if record.score is None else record.score.value,
        "scorer": None if record.score is None else record.score.scorer,
        "min_version": record.min_version,
        "max_version": record.max_version,
    }


def conversations_of(
    turns: Sequence[DispatchedSamplingTask],
) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    """Yield the conversations of an attempt, and the tools that each was shown.

    Every reply of the policy is trained on once: an assistant message that is repeated in a context
    or in another conversation gets `"weight": 0`.

    Args:
        turns: all turns of the attempt, in order of `index` from 0.
    """
    included: set[int] = set()
    for path, tools in paths_of(turns):
        messages: list[Message] = []
        for previous, turn in zip([None, *path[:-1]], path, strict=True):
            if previous is not None:
                messages += [_result(result) for result in previous.tool_results]
            messages += [_context(message) for message in turn.added_messages]
            message = assistant_message(turn, tools)
            messages.append({**message, "weight": 0} if turn.index in included else message)
            included.add(turn.index)
        yield messages, tools


def paths_of(
    turns: Sequence[DispatchedSamplingTask],
) -> Iterator[tuple[list[DispatchedSamplingTask], list[dict[str, Any]]]]:
    """Yield the turns of each conversation of an attempt, and the tools that it was shown.

    A turn is part of every conversation that continues it. Calls of other models are omitted unless
    the policy continues them.

    Args:
        turns: all turns of the attempt, in order of `index` from 0.
    """
    continued = {turn.parent for turn in turns if _continues(turn)}
    for leaf in turns:
        if leaf.index in continued or not leaf.trainable:
            continue
        path = [leaf]
        while _continues(path[-1]):
            path.append(turns[path[-1].parent or 0])
        yield path[::-1], _tools_of(path[-1], turns)


def assistant_message(turn: DispatchedSamplingTask, tools: Sequence[dict[str, Any]]) -> Message:
    """Return a reply as a message, with thinking and tool calls in separate fields.

    The format of its calls is the one that parses the same calls as the rollout; if there is none,
    the text is kept unchanged.
    """
    reply = _parsed_reply(turn, tools)
    if reply is None:
        return {"role": "assistant", "content": turn.output_text}
    message: Message = {"role": "assistant", "content": reply.content.strip()}
    if reply.reasoning.strip():
        message["reasoning_content"] = reply.reasoning.strip()
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in turn.tool_calls
        ]
    return message


def _parsed_reply(turn: DispatchedSamplingTask, tools: Sequence[dict[str, Any]]) -> Reply | None:
    text = turn.output_text
    if any(call.format_error is not None for call in turn.tool_calls):
        return None  # a guessed call must not become training data
    before, closes, _ = text.partition(THINK_CLOSE)
    starts_inside = bool(closes) and THINK_OPEN not in before
    call_names = [call.name for call in turn.tool_calls]
    for format_ in all_tool_call_formats():
        reply = parse_reply(text, format_, starts_inside=starts_inside, tools=tools)
        if [call.name for call in reply.tool_calls] == call_names:
            return reply
    return None


def _continues(turn: DispatchedSamplingTask) -> bool:
    return turn.parent is not None and turn.branch_reason in CONTINUING


def _tools_of(
    turn: DispatchedSamplingTask, turns: Sequence[DispatchedSamplingTask]
) -> list[dict[str, Any]]:
    while turn.parent is not None:
        turn = turns[turn.parent]
    return [dict(tool) for tool in turn.tools]


def _result(result: Any) -> Message:
    return {
        "role": "tool",
        "tool_call_id": result.call_id,
        "name": result.name,
        "content": result.content,
    }


def _context(message: Message) -> Message:
    return {**message, "weight": 0} if message.get("role") == "assistant" else message


class _JsonLines:
    """Writes rows to `SPLIT.jsonl`."""

    def __init__(self, folder: Path, split: str) -> None:
        self._file = (folder / f"{split}.jsonl").open("w", encoding="utf-8")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")


class _ParquetRows:
    """Writes rows to `data/SPLIT.parquet`; values that differ in type from row to row are JSON."""

    def __init__(self, folder: Path, split: str) -> None:
        try:
            self._arrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ModuleNotFoundError:
            raise ConfigError(
                "a dataset needs pyarrow: pip install 'agentrl-mongo[parquet]'"
            ) from None
        (folder / "data").mkdir(exist_ok=True)
        self._schema = _schema(self._arrow)
        self._rows: list[dict[str, Any]] = []
        path = folder / "data" / f"{split}.parquet"
        self._file = parquet.ParquetWriter(path, self._schema, compression="zstd")

    def close(self) -> None:
        """Write the pending rows, and finish the file."""
        self._flush()
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        texts = {
            name: row.get(name) if isinstance(row.get(name), str | None) else _json(row[name])
            for name in ("tools", "reference", "answer")
        }
        messages = [_plain(message) for message in row["messages"]]
        self._rows.append({**row, **texts, "messages": messages})
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []


def _schema(arrow: Any) -> Any:
    text = arrow.string()
    function = arrow.struct([("name", text), ("arguments", text)])
    call = arrow.struct([("id", text), ("type", text), ("function", function)])
    message = arrow.struct(
        [
            *((name, text) for name in ("role", "content", "reasoning_content")),
            ("tool_calls", arrow.list_(call)),
            ("tool_call_id", text),
            ("name", text),
            ("weight", arrow.int32()),
        ]
    )
    scalars = [(name, arrow.type_for_alias(kind)) for name, kind in _SCALARS.items()]
    return arrow.schema([("messages", arrow.list_(message)), *scalars])


def _plain(message: Message) -> Message:
    """Return a message whose content is text; parts of a list (images) become JSON."""
    content = message.get("content")
    return {**message, "content": content if isinstance(content, str | None) else _json(content)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _card(run: str, counts: Mapping[str, int]) -> str:
    """Return the dataset card, whose header lists the files of the splits."""
    files = "".join(f"  - split: {name}\n    path: data/{name}.parquet\n" for name in counts)
    rows = "".join(f"| {name} | {count} |\n" for name, count in counts.items())
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}tags:\n- agentrl\n---\n\n"
        f"# Conversations of the run {run}\n\n"
        "Every row is one conversation of a rollout, with the tools that the model was shown, its "
        "answer, the reference and the score. Assistant messages with `weight` 0 are context; another "
        "row contains them as replies.\n\n"
        f"| split | conversations |\n|---|---|\n{rows}"
    )
