"""A trajectory of Harbor's (ATIF) as the turns of one attempt.

Input: a validated document. Output: a turn for each step of the policy. Ids and logprobs are used
unchanged; a step without ids becomes a turn that can be read and scored, but not trained on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from agentrl.datasets.entries import BadEntry
from agentrl.plugins.sft.demonstrations.atif_documents import (
    OURS,
    AtifStep,
    AtifTrajectory,
    messages_of_step,
    own_facts,
)
from agentrl.plugins.sft.demonstrations.demonstration import UNKNOWN_LOGPROB
from agentrl.schema import (
    DispatchedSamplingTask,
    Message,
    SamplingParams,
    ToolCall,
    ToolResult,
    VersionSpan,
    num_shared_ids,
)


def turns_of(
    trajectory: AtifTrajectory, record_id: str, task_id: str, fence: int
) -> list[DispatchedSamplingTask]:
    """Return the turns of a trajectory and of all that are embedded in it.

    Args:
        trajectory: the attempt.
        record_id: of the Record that it becomes.
        task_id: of the Record's Task.
        fence: of the Record's lease, which ids of turns hold.

    Raises:
        BadEntry: a step cannot become a turn; the message names the step and the reason.
    """
    found = _TurnReader(record_id, task_id).turns(trajectory)
    return [turn.model_copy(update={"id": f"{record_id}/{fence}/{turn.index}"}) for turn in found]


class _TurnReader:
    """Makes the turns of one trajectory."""

    def __init__(self, record_id: str, task_id: str) -> None:
        self._identity = {"id": "", "record_id": record_id, "task_id": task_id, "attempt": 1}
        self._turns: list[DispatchedSamplingTask] = []
        self._full_ids: list[np.ndarray] = []
        self._index_by_stored: dict[int, int] = {}
        """Index stored in a step -> index of its turn here."""

    def turns(self, trajectory: AtifTrajectory) -> list[DispatchedSamplingTask]:
        for context in trajectory.contexts:
            self._read(context)
        return self._in_sampling_order()

    def _read(self, context: AtifTrajectory) -> None:
        parent: int | None = None
        pending: list[Message] = []
        for step in context.steps:
            facts = own_facts(step.extra)
            if step.is_sampled:
                pending = self._add(step, context, parent, pending)
                parent = len(self._turns) - 1
            elif step.is_copied_context and _number(facts, "turn") in self._index_by_stored:
                parent, pending = self._index_by_stored[_number(facts, "turn")], []
            else:
                pending += [
                    {key: value for key, value in message.items() if key != "weight"}
                    for message in messages_of_step(step)
                ]

    def _add(
        self,
        step: AtifStep,
        context: AtifTrajectory,
        parent: int | None,
        messages: Sequence[Message],
    ) -> list[Message]:
        """Append a step of the policy; return the observations that belong to none of its calls."""
        facts = own_facts(step.extra)
        if parent is None:
            parent = self._index_by_stored.get(_number(facts, "parent"))
        step_messages = list(messages_of_step(step))
        calls = tuple(
            ToolCall(
                id=call.tool_call_id,
                name=call.function_name,
                arguments=call.arguments,
                format_error=_text_of(own_facts(call.extra).get("format_error")),
            )
            for call in step.tool_calls or ()
        )
        call_ids = {call.id for call in calls}
        results_in_step = () if step.observation is None else step.observation.results
        results = tuple(
            ToolResult(
                call_id=message["tool_call_id"],
                name=message["name"],
                content=message["content"],
                is_error=bool(own_facts(result.extra).get("is_error")),
            )
            for message, result in zip(step_messages[1:], results_in_step, strict=True)
            if message["tool_call_id"] in call_ids
        )
        text = _text_of(facts.get("text"))
        fields: dict[str, Any] = {
            **self._identity,
            **self._tokens(step, parent),
            "index": len(self._turns),
            "added_messages": tuple(messages),
            "output_text": step_messages[0]["content"] if text is None else text,
            "tool_calls": calls,
            "tool_results": results,
            "finish_reason": facts.get("finish_reason", "stop"),
            "sampling_params": facts.get("sampling_params", SamplingParams()),
        }
        if fields["parent"] is None:
            fields["tools"] = context.agent.tool_definitions or ()
        try:
            turn = DispatchedSamplingTask.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadEntry(f"step {step.step_id}: {where}: {first['msg']}") from None
        if _number(facts, "turn") >= 0:
            self._index_by_stored[_number(facts, "turn")] = turn.index
        self._turns.append(turn)
        return [message for message in step_messages[1:] if message["tool_call_id"] not in call_ids]

    def _tokens(self, step: AtifStep, parent: int | None) -> dict[str, Any]:
        """Return the fields of a turn that hold its tokens; a turn without tokens is not trained."""
        metrics, facts = step.metrics, own_facts(step.extra)
        if metrics is None or not metrics.has_tokens:
            self._full_ids.append(np.empty(0, dtype=np.int32))
            no_tokens: dict[str, Any] = dict.fromkeys(
                ("added_ids", "output_ids", "output_logprobs"), ()
            )
            return {**no_tokens, "version_spans": (), "parent": parent, "trainable": False}
        parent_ids = None if parent is None else self._full_ids[parent]
        prompt = np.asarray(metrics.prompt_token_ids, dtype=np.int32)
        output = np.asarray(metrics.completion_token_ids, dtype=np.int32)
        shared = 0 if parent_ids is None else num_shared_ids(parent_ids, prompt)
        is_truncated = parent_ids is not None and shared < len(parent_ids)
        self._full_ids.append(np.concatenate([prompt, output]))
        logprobs = metrics.logprobs
        return {
            "parent": parent,
            "shared_len": shared,
            "added_ids": prompt[shared:],
            "output_ids": output,
            "output_logprobs": [UNKNOWN_LOGPROB] * len(output) if logprobs is None else logprobs,
            "version_spans": _spans(facts.get("versions"), len(output)),
            "branch_reason": facts.get("branch_reason") or ("drift" if is_truncated else None),
            # Turns with images cannot be trained on, because the file does not contain the images.
            "trainable": bool(facts.get("trainable", True)) and not facts.get("num_images"),
        }

    def _in_sampling_order(self) -> list[DispatchedSamplingTask]:
        """Return the turns in the order that the steps specify, if all of them specify one."""
        if sorted(self._index_by_stored) != list(range(len(self._turns))):
            return self._turns
        stored_index = {index: stored for stored, index in self._index_by_stored.items()}
        renumbered = [
            turn.model_copy(
                update={
                    "index": stored_index[turn.index],
                    "parent": None if turn.parent is None else stored_index[turn.parent],
                }
            )
            for turn in self._turns
        ]
        if any(turn.parent is not None and turn.parent >= turn.index for turn in renumbered):
            return self._turns
        return sorted(renumbered, key=lambda turn: turn.index)


def _number(facts: Mapping[str, Any], name: str) -> int:
    """Return a number that AgentRL's export wrote; -1 if it is missing."""
    value = facts.get(name)
    return value if isinstance(value, int) and value >= 0 else -1


def _text_of(given: object) -> str | None:
    return given if isinstance(given, str) else None


def _spans(given: object, length: int) -> tuple[VersionSpan, ...]:
    """Return the versions of tokens; none if they are missing or invalid."""
    spans: list[VersionSpan] = []
    for span in given if isinstance(given, list) else ():
        if not (
            isinstance(span, list) and len(span) == 3 and all(isinstance(n, int) for n in span)
        ):
            raise BadEntry(f"extra.{OURS}.versions: a span is [version, start, end]")
        version, start, end = span
        if not (version >= 0 and 0 <= start < end <= length):
            raise BadEntry(f"extra.{OURS}.versions: {span} is not a span of {length} tokens")
        spans.append(VersionSpan(version=version, start=start, end=end))
    return tuple(spans)
