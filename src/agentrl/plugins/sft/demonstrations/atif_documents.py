"""Documents of Harbor's trajectory format (ATIF 1.8), read from untrusted files.

Input: files. Output: fully validated values, and their conversations as messages.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from agentrl.datasets.entries import BadEntry, Entry, read_entries
from agentrl.errors import DatasetError
from agentrl.schema.base import Message, Value

VERSION = "ATIF-v1.8"
OURS = "agentrl"
"""Key of AgentRL's own data in the `extra` of documents, steps and metrics."""
_MAX_DOCUMENT_CHARS = 1 << 27
_MAX_TOKEN_ID = 2**31 - 1
_MAX_LOGPROB = 1e30
"""Must be finite as float32, its stored type."""
_MAX_EMBEDDED = 1000


class AtifPart(Value):
    """A part of a message, possibly other than text."""

    type: Literal["text", "image", "audio"]
    text: str | None = None


AtifContent = str | tuple[AtifPart, ...] | None


class AtifCall(Value):
    """A tool call."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class AtifResult(Value):
    """The result of a tool call."""

    source_call_id: str | None = None
    content: AtifContent = None
    extra: dict[str, Any] | None = None


class AtifObservation(Value):
    """The results of a step's calls."""

    results: tuple[AtifResult, ...]


class AtifMetrics(Value):
    """Counts and tokens of a step."""

    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_tokens(self) -> "AtifMetrics":
        for ids in (self.prompt_token_ids or (), self.completion_token_ids or ()):
            if ids and not 0 <= min(ids) <= max(ids) <= _MAX_TOKEN_ID:
                raise ValueError("a token id must be a number from 0 to 2147483647")
        if self.completion_token_ids is not None and self.prompt_token_ids is None:
            raise ValueError("completion_token_ids without prompt_token_ids")
        if self.logprobs is not None:
            if len(self.logprobs) != len(self.completion_token_ids or ()):
                raise ValueError("logprobs and completion_token_ids differ in length")
            if not all(abs(logprob) <= _MAX_LOGPROB for logprob in self.logprobs):
                raise ValueError("a logprob must be a finite number")
        return self

    @property
    def has_tokens(self) -> bool:
        """Whether the step can be trained on as it was sampled."""
        return bool(self.completion_token_ids)


class AtifStep(Value):
    """One step of a trajectory."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | tuple[AtifPart, ...]
    reasoning_content: str | None = None
    tool_calls: tuple[AtifCall, ...] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    extra: dict[str, Any] | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether a model sampled it here, as opposed to a copy from elsewhere."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0


class AtifAgent(Value):
    """Who acted."""

    name: str
    tool_definitions: tuple[dict[str, Any], ...] | None = None


class AtifTrajectory(Value):
    """A document."""

    schema_version: str = Field(pattern=r"^ATIF-v1\.\d+$")
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: tuple[AtifStep, ...] = Field(min_length=1)
    subagent_trajectories: tuple["AtifTrajectory", ...] | None = Field(
        default=None, max_length=_MAX_EMBEDDED
    )
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> "AtifTrajectory":
        for position, step in enumerate(self.steps, start=1):
            if step.step_id != position:
                raise ValueError(f"step_id {step.step_id} is at position {position}")
            if step.source != "agent" and (step.tool_calls or step.metrics):
                raise ValueError(f"step {position}: only agent steps have tool_calls and metrics")
        return self

    @property
    def contexts(self) -> Iterator["AtifTrajectory"]:
        """The trajectory itself and, in order, all that are embedded in it."""
        yield self
        for embedded in self.subagent_trajectories or ():
            yield from embedded.contexts


def is_trajectory(entry: object) -> bool:
    """Return whether an entry of a data file is meant as a trajectory."""
    version = entry.get("schema_version") if isinstance(entry, Mapping) else None
    return isinstance(version, str) and version.startswith("ATIF-")


def read_trajectories(path: Path) -> Iterator[tuple[str, AtifTrajectory]]:
    """Yield the trajectories of a file or of all files below a folder, and the place of each.

    Args:
        path: a `.json` file with one document or a list, a `.jsonl` file, or a folder of such.

    Raises:
        DatasetError: there is none, or one is malformed; the message names the place.
    """
    if path.is_dir():
        files = sorted(found for found in path.rglob("*.json*") if found.is_file())
        if not files:
            raise DatasetError(f"{path} contains no .json or .jsonl file, and no export of a run")
    else:
        files = [path]
    for file in files:
        for where, entry in _entries(file):
            try:
                yield f"{file}: {where}", checked_trajectory(entry)
            except BadEntry as problem:
                raise DatasetError(f"{file}: {where}: {problem}") from None


def _entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file; a single document may span many lines."""
    if path.suffix == ".json" and path.is_file():
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            text = file.read(_MAX_DOCUMENT_CHARS + 1)
        if text.lstrip().startswith("{"):
            if len(text) > _MAX_DOCUMENT_CHARS:
                raise DatasetError(f"{path}: longer than {_MAX_DOCUMENT_CHARS >> 20} Mi characters")
            try:
                yield "document", json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DatasetError(f"{path}: not usable JSON: {error}") from None
            return
    yield from read_entries(path)


def checked_trajectory(entry: Any) -> AtifTrajectory:
    """Parse a document.

    Raises:
        BadEntry: it is invalid; the message names the problem and its place.
    """
    if isinstance(entry, BadEntry):
        raise entry
    if not is_trajectory(entry):
        raise BadEntry('not a trajectory: "schema_version" must be "ATIF-v1.8" or earlier')
    try:
        # JSON can contain lone surrogates, which files and databases cannot.
        json.dumps(entry, ensure_ascii=False).encode()
        return AtifTrajectory.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise BadEntry(f"{where}: {message}".removeprefix(": ")) from None
    except UnicodeEncodeError:
        raise BadEntry("a text contains a lone surrogate") from None
    except RecursionError:
        raise BadEntry("nested too deeply") from None


def messages_of(trajectory: AtifTrajectory) -> Iterator[Message]:
    """Yield the messages of a trajectory; copied steps and steps without a model get weight 0.

    Raises:
        BadEntry: a step contains something that a conversation cannot represent.
    """
    for step in trajectory.steps:
        yield from messages_of_step(step)


def messages_of_step(step: AtifStep) -> Iterator[Message]:
    """Yield the messages of a step, then the results of its calls; see `messages_of`."""
    if step.source != "agent":
        yield {"role": step.source, "content": _text(step.message)}
    else:
        message: Message = {"role": "assistant", "content": _text(step.message)}
        if step.reasoning_content:
            message["reasoning_content"] = step.reasoning_content
        if step.tool_calls:
            message["tool_calls"] = [_openai_call(call) for call in step.tool_calls]
        yield message if step.is_sampled else {**message, "weight": 0}
    names = {call.tool_call_id: call.function_name for call in step.tool_calls or ()}
    for result in () if step.observation is None else step.observation.results:
        call_id = result.source_call_id or ""
        yield {
            "role": "tool",
            "tool_call_id": call_id,
            "name": names.get(call_id, ""),
            "content": _text(result.content),
        }


def own_facts(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the data that AgentRL's export wrote into an `extra`; empty for other writers."""
    given = (extra or {}).get(OURS)
    return given if isinstance(given, Mapping) else {}


def _openai_call(call: AtifCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.function_name, "arguments": arguments},
    }


def _text(content: AtifContent) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" for part in content):
        raise BadEntry("images and audio in trajectories are not supported")
    return "\n".join(part.text or "" for part in content)
