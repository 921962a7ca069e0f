"""Demonstrations as turns: the prompts and replies that a rollout would have produced.

Every assistant message is one turn. Prompts continue each other exactly as in a rollout
(`Conversation`), so rollouts of a fine-tuned model consist of the tokens that it was trained on, even
where the template removes thinking from the history.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.user_code import load_user_module
from agentrl.datasets.entries import BadEntry, folder_of, read_entries
from agentrl.datasets.question import image_address
from agentrl.errors import DatasetError, RenderError
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.renderer import Renderer
from agentrl.renderers.template_traits import REASONING_KEYS
from agentrl.renderers.tool_calls.typed_values import Parameters
from agentrl.schema import DispatchedSamplingTask, Message, SamplingParams, VersionSpan
from agentrl.schema.image import IMAGE_MARK, image_part, parts_at_marks

logger = logging.getLogger(__name__)
_FUNCTION = "demonstrations"
"""Name of the function in a user's Python file that yields conversations."""
_KEYS = {
    *("role", "content", "name", "tool_calls", "tool_call_id", "weight", "refusal"),
    *REASONING_KEYS,
}
"""Keys of messages that have a meaning."""
_NOT_LEARNED = ("loss", "train")
"""Keys under which other trainers' files say that a message is not learned."""
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
}
UNKNOWN_LOGPROB = float("nan")
"""Behavior logprob of tokens that no model sampled."""


@dataclass(frozen=True)
class Demonstration:
    """One conversation to learn from, in the form of OpenAI's fine-tuning files."""

    id: str
    messages: tuple[Message, ...]
    """An assistant message with `"weight": 0` is context and not learned."""
    tools: tuple[dict[str, Any], ...] = ()
    source: str = field(default="", compare=False)
    """Where its file has it: `line 3`."""


def read_demonstrations(path: Path) -> Iterator[Demonstration]:
    """Yield the conversations of a file: objects with `messages`, perhaps `tools` and `id`."""
    folder, unknown = folder_of(path), set[str]()
    is_table = not {".py", ".json", ".jsonl"} & {*path.suffixes}
    for where, entry in _made_entries(path) if path.suffix == ".py" else read_entries(path):
        try:
            demonstration = _demonstration(entry, where, folder, is_table=is_table)
        except BadEntry as problem:
            raise DatasetError(f"{path}: {where}: {problem}") from None
        unknown.update(*demonstration.messages)
        yield demonstration
    if unknown := unknown - _KEYS:
        logger.warning(
            "%s: messages have the keys %s, which only the model's chat template might read",
            path,
            ", ".join(sorted(unknown)),
        )


def demonstration_turns(
    demonstration: Demonstration,
    renderer: Renderer,
    *,
    record_id: str,
    task_id: str,
    fence: int = 1,
) -> list[DispatchedSamplingTask]:
    """Return a conversation as the turns of one record.

    Args:
        demonstration: the conversation.
        renderer: of the model that learns the conversation.
        record_id: id of the turns' Record.
        task_id: id of its Task.
        fence: fencing token of the lease under which the turns are stored, if they are.
    """
    conversation = Conversation([], tools=demonstration.tools)
    turns: list[DispatchedSamplingTask] = []
    messages = renderer.with_call_ids(
        [_without_weight(message) for message in demonstration.messages]
    )
    _check_shown(messages, demonstration.tools, renderer)
    new: list[Message] = []
    for position, (message, given) in enumerate(zip(messages, demonstration.messages, strict=True)):
        if message["role"] != "assistant":
            conversation.add(message)
            new.append(message)
            continue
        try:
            prompt = conversation.next_prompt(renderer)
            output_ids = renderer.reply_ids(
                conversation.history,
                message,
                demonstration.tools,
                following=messages[position + 1 :],
            )
        except RenderError as error:
            raise RenderError(f"messages[{position}]: {error}") from error
        # From here on, the conversation holds what a rollout would: the reply as it is read.
        reply = renderer.parse(output_ids, turn=len(turns), tools=demonstration.tools)
        turns.append(
            DispatchedSamplingTask(
                id=f"{record_id}/{fence}/{len(turns)}",
                record_id=record_id,
                task_id=task_id,
                attempt=1,
                index=len(turns),
                parent=prompt.parent,
                shared_len=prompt.shared_len,
                added_ids=prompt.added_ids,
                shared_images=prompt.shared_images,
                added_images=prompt.added_images,
                **renderer.image_fields(prompt.added_images),
                output_ids=output_ids,
                output_logprobs=np.full(len(output_ids), UNKNOWN_LOGPROB, dtype=np.float32),
                version_spans=(VersionSpan(version=0, start=0, end=len(output_ids)),),
                added_messages=tuple(new),
                tools=demonstration.tools if prompt.parent is None else (),
                output_text=renderer.decode(output_ids),
                tool_calls=reply.tool_calls,
                finish_reason="stop",
                branch_reason=prompt.branch_reason,
                trainable=given.get("weight", 1) != 0,
                sampling_params=SamplingParams(),
            )
        )
        full_ids = np.concatenate([prompt.ids, output_ids])
        conversation.replied(len(turns) - 1, full_ids, reply.message)
        new = []
    return turns


def _made_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what the function of a user's file makes, with its number."""
    function = getattr(load_user_module(path, str(path)), _FUNCTION, None)
    if not callable(function):
        raise DatasetError(
            f"{path}: the file has no function {_FUNCTION}(), which yields the conversations"
        )
    try:
        for number, entry in enumerate(function(), 1):
            # As a file would hold it: the caller owns what it gets, and tuples become lists.
            yield f"conversation {number}", json.loads(json.dumps(entry))
    except Exception as error:
        raise DatasetError(f"{path}: {_FUNCTION}(): {type(error).__name__}: {error}") from error


def _check_shown(
    messages: Sequence[Message], tools: tuple[dict[str, Any], ...], renderer: Renderer
) -> None:
    """Refuse a conversation of which the model would not see everything."""
    try:
        left_out = renderer.unshown(messages, tools)
    except RenderError as error:
        raise _first_refusal(error, messages, tools, renderer) from error
    if left_out:
        number = int(left_out[0].partition("[")[2].partition("]")[0])
        raise RenderError(
            f"{left_out[0]}: the model's chat template does not show it (role "
            f"{messages[number]['role']!r}); remove it, or write it into the content of a message "
            "that is shown"
        )


def _first_refusal(
    error: RenderError,
    messages: Sequence[Message],
    tools: tuple[dict[str, Any], ...],
    renderer: Renderer,
) -> RenderError:
    """Return the refusal of a conversation with the message at which it begins."""
    # From the end: some templates also refuse beginnings that are too short.
    for stop in range(len(messages) - 1, 0, -1):
        try:
            renderer.render(messages[:stop], tools, add_generation_prompt=False)
        except RenderError as earlier:
            error = earlier
        else:
            return RenderError(f"messages[{stop}]: {error}")
    return RenderError(f"messages[0]: {error}")


def _demonstration(entry: Any, where: str, folder: Path | None, *, is_table: bool) -> Demonstration:
    if isinstance(entry, BadEntry):
        raise entry
    given = _parsed(entry, "messages") if isinstance(entry, dict) else None
    if given is None and isinstance(entry, dict):
        given = _from_share_gpt(entry)
    if not isinstance(given, list):
        raise BadEntry('expected an object with a list "messages"')
    tools = _tools(_parsed(entry, "tools"))
    whole = [_without_nulls(message, tools if is_table else None) for message in given]
    placed = _placed(whole, entry.get("images") or entry.get("image"))
    messages = [_weighted(_with_files(message, folder)) for message in placed]
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise BadEntry('a message must be an object with a "role"')
        if message.get("weight", 1) not in (0, 1):
            raise BadEntry(f'"weight" of a message must be 0 or 1, not {message["weight"]!r}')
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        raise BadEntry("contains no assistant message to learn from")
    if messages[0]["role"] == "assistant":
        raise BadEntry("starts with an assistant message; add the message that it answers")
    return Demonstration(
        id=str(entry.get("id") or where.replace(" ", "")),
        messages=tuple(messages),
        tools=tools,
        source=where,
    )


def _from_share_gpt(entry: dict[str, Any]) -> list[Message] | None:
    """Return the messages of a row in ShareGPT's form, if it is one."""
    given = _parsed(entry, "conversations")
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        return None
    system = [{"from": "system", "value": entry["system"]}] if entry.get("system") else []
    messages: list[Message] = []
    for one in [*system, *given]:
        speaker, text = str(one.get("from")), one.get("value")
        message: Message = {"role": _SPEAKERS.get(speaker, speaker), "content": text}
        if speaker == "function_call":
            calls = _parsed(one, "value")
            message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
        messages.append(message)
    return messages


def _weighted(message: Message) -> Message:
    """Return a message that says by its weight alone whether it is learned."""
    flags = {key: message[key] for key in _NOT_LEARNED if key in message}
    if any(value not in (0, 1) for value in flags.values()):
        raise BadEntry(f"{_NOT_LEARNED} of a message must be true or false, not {flags}")
    rest = {key: value for key, value in message.items() if key not in flags}
    return rest if all(flags.values()) else {**rest, "weight": 0}


def _without_nulls(message: Any, tools: tuple[dict[str, Any], ...] | None) -> Message:
    """Return a message without the null fields that table formats add to every row.

    Of a table, whose tools are given, this includes parts of its content, and arguments that do not
    admit null.
    """
    fields = message if isinstance(message, dict) else {}
    kept = {key: value for key, value in fields.items() if value is not None or key == "content"}
    if tools is not None and isinstance(kept.get("content"), list):
        kept["content"] = _pruned(kept["content"])
    if tools is not None and isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_call_without_nulls(call, tools) for call in kept["tool_calls"]]
    return kept


def _call_without_nulls(call: Any, tools: tuple[dict[str, Any], ...]) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    if function is None or not isinstance(given, dict):
        return call
    parameters = Parameters(str(function.get("name")), tools)
    kept = {
        key: _pruned(value)
        for key, value in given.items()
        if value is not None or parameters.allows_null(key)
    }
    function = {**function, "arguments": kept}
    return {**call, "function": function} if "function" in call else function


def _pruned(value: Any) -> Any:
    """Return a value of a table without the null fields of its objects."""
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _pruned(item)
        for key, item in value.items()
        if item is not None or key in ("default", "const")
    }


def _placed(messages: Sequence[Message], images: Any) -> list[Message]:
    """Return messages with the images of a row at their places: marks, and parts without a file."""
    if not images:
        return list(messages)
    given = images if isinstance(images, list) else [images]
    left, num_places, placed = iter(given), 0, []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and IMAGE_MARK in content:
            content = parts_at_marks(content)
        if isinstance(content, list):
            empty = [part == {"type": "image"} for part in content]
            num_places += sum(empty)
            content = [
                {"type": "image", "image": next(left, None)} if is_empty else part
                for part, is_empty in zip(content, empty, strict=True)
            ]
        placed.append({**message, "content": content} if content else message)
    if num_places != len(given):
        raise BadEntry(
            f"{num_places} marks {IMAGE_MARK} (or parts of the type image) in the messages and "
            f"{len(given)} images; write one for each image"
        )
    return placed


def _with_files(message: Message, folder: Path | None) -> Message:
    """Return a message with embedded images in place of file names."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_with_file(part, folder) for part in content]}


def _with_file(part: Any, folder: Path | None) -> Any:
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return part
    named = part.get("image_url", part.get("image"))
    if isinstance(named, dict):
        named = named.get("url", named)
    address = image_address(named, folder)
    if not address.startswith("data:"):
        raise BadEntry(f"image {address[:80]!r}: conversations must refer to image files, not URLs")
    return image_part(address)


def _parsed(entry: dict[str, Any], key: str) -> Any:
    """Return a nested value; table formats store it as JSON text."""
    value = entry.get(key)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise BadEntry(f'"{key}" is not valid JSON') from None


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise BadEntry('"tools" must be a list of schemas in OpenAI format')
    return tuple(_pruned(tool) for tool in given)


def _without_weight(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "weight"}
