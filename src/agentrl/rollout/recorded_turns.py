"""Turns that a rollout plays before it samples: of a resumed attempt, or before a fork or branch.

A rollout's `run` starts from the beginning; `AsyncSampler.generate` looks up each prompt here and
uses the recorded turns as replies until none are left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np

from agentrl.errors import RenderError, ToolError
from agentrl.renderers.conversation import Conversation, Prompt
from agentrl.renderers.renderer import Renderer
from agentrl.schema import (
    DispatchedSamplingTask,
    Message,
    ToolCall,
    ToolResult,
    num_shared_ids,
    rebuild_images,
    rebuild_prompts,
)
from agentrl.schema.fork import check_fork_turn, result_message

_PER_CALL_SAMPLING = {"seed", "max_new_tokens", "grammar", "stop"}
"""Sampling parameters that belong to one call; the others are those of the whole rollout."""
_CONTEXT_TOKENS = 8
"""Tokens shown on either side of the first difference between a recorded and a rendered prompt."""


@dataclass(kw_only=True)
class RecordedTurns:
    """Turns that a rollout plays before it samples, and what changes where it goes on.

    Prompts up to `turn` are the parent's stored ids, even if a template or tokenizer would encode
    their texts differently today. Behind it, this process must render exactly the prompts that the
    attempt's own turns were sampled from: it continues where they end, from messages that it builds
    itself.

    Attributes:
        turns: the turns to play: the parent's before `turn`, then those of the attempt.
        num_own: how many of them belong to this attempt already; the others are stored as its own.
        parent: all turns of the Record that the rollout leaves; empty if it leaves none.
        turn: index of the parent's turn that is sampled again; -1 without a parent.
        messages: what the model sees at `turn` in place of the parent's messages.
        sampling: parameters of all new turns.
        first_sampling: additional parameters of the first.
        replays_calls: the tools keep state: the calls before `turn` are made again, so that the
            rollout's own tools are where the parent's were.
        state: what the parent's `AsyncSampler.snapshot` returned before the turn; None without one.
        uses_parents_results: the tools keep state and cannot be called in the middle of a rollout:
            results behind `turn` are the parent's as long as the calls are.
    """

    turns: tuple[DispatchedSamplingTask, ...] = ()
    num_own: int = 0
    parent: tuple[DispatchedSamplingTask, ...] = ()
    turn: int = -1
    messages: tuple[Message, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    first_sampling: Mapping[str, Any] = field(default_factory=dict)
    replays_calls: bool = False
    state: bytes | None = None
    uses_parents_results: bool = False
    _has_same_calls: bool = field(default=True, init=False)

    @classmethod
    def of_attempt(cls, turns: Sequence[DispatchedSamplingTask]) -> Self:
        """Return the durable turns of an attempt whose holder died or released it."""
        return cls(turns=tuple(turns), num_own=len(turns))

    @classmethod
    def before_branch(
        cls,
        parent: Sequence[DispatchedSamplingTask],
        turn: int,
        own: Sequence[DispatchedSamplingTask] = (),
        *,
        replays_calls: bool,
        state: bytes | None = None,
    ) -> Self:
        """Return the turns before a branch; `own` are those that another process stored of it."""
        check_fork_turn(parent, turn)
        return cls(
            turns=(*own, *parent[len(own) : turn]),
            num_own=len(own),
            parent=tuple(parent),
            turn=turn,
            replays_calls=replays_calls,
            state=state,
        )

    @classmethod
    def before_fork(
        cls,
        parent: Sequence[DispatchedSamplingTask],
        turn: int,
        *,
        messages: Sequence[Message] | None = None,
        sampling: Mapping[str, Any] | None = None,
        tools_keep_state: bool,
    ) -> Self:
        """Return the turns before a turn that is sampled again with other messages or parameters."""
        check_fork_turn(parent, turn)
        turns = tuple(parent[:turn])
        if messages is not None and turn:
            turns = (*turns[:-1], _with_results(turns[-1], messages))
        own = parent[turn].sampling_params
        return cls(
            turns=turns,
            parent=tuple(parent),
            turn=turn,
            messages=None if messages is None else tuple(messages),
            sampling={**own.model_dump(exclude=_PER_CALL_SAMPLING), **(sampling or {})},
            first_sampling={"grammar": own.grammar, "stop": own.stop},
            uses_parents_results=tools_keep_state,
        )

    def is_own(self, index: int) -> bool:
        """Return whether a turn already belongs to this attempt."""
        return index < self.num_own

    def parent_turn(self, index: int) -> DispatchedSamplingTask | None:
        """Return the parent's turn whose prompt turn `index` has too; None behind `turn`."""
        return self.parent[index] if index <= self.turn else None

    def prompt(self, index: int, conversation: Conversation, renderer: Renderer) -> Prompt:
        """Return the prompt of turn `index`: up to `turn` the stored one."""
        if index == 0 and self.parent:
            conversation.tools = self.parent[0].tools
        if index == self.turn and self.messages is not None:
            conversation.pending = list(self.messages)
        elif index <= self.turn:
            return self._stored_prompts[index]
        prompt = conversation.next_prompt(renderer)
        if index < len(self.turns):
            turn = self.turns[index]
            difference = difference_of(turn, prompt, renderer)
            if difference:
                raise RenderError(
                    f"{turn.record_id} cannot be resumed: its turn {turn.index} was sampled from "
                    "a different prompt than this process renders (different tools, template or "
                    f"sampler class): {difference}"
                )
        return prompt

    def result(self, turn: DispatchedSamplingTask, call: ToolCall) -> ToolResult | None:
        """Return the recorded result of a call of the last turn, if there is one.

        Raises:
            ToolError: there is none, and the tools cannot be called in the middle of a rollout.
        """
        if turn.index < self.turn or not self.uses_parents_results:
            return _result_of(turn, call.id)
        recorded = self.parent[turn.index] if turn.index < len(self.parent) else None
        self._has_same_calls &= recorded is not None and _calls(recorded) == _calls(turn)
        if recorded is not None and self._has_same_calls:
            position = turn.tool_calls.index(call)
            found = _result_of(recorded, recorded.tool_calls[position].id)
            if found is not None:
                return found.model_copy(update={"call_id": call.id})
        raise ToolError(
            f"cannot be forked after turn {turn.index}: the result of its call to {call.name} was "
            "not recorded, and the tools may keep state; set --resumable_tools true if they keep "
            "none"
        )

    @cached_property
    def _stored_prompts(self) -> list[Prompt]:
        turns = self.parent[: self.turn + 1]
        return [
            Prompt(
                ids,
                turn.parent,
                turn.shared_len,
                turn.branch_reason,
                images=images,
                shared_images=turn.shared_images,
            )
            for turn, ids, images in zip(
                turns, rebuild_prompts(turns), rebuild_images(turns), strict=True
            )
        ]


def _result_of(turn: DispatchedSamplingTask, call_id: str) -> ToolResult | None:
    return next((result for result in turn.tool_results if result.call_id == call_id), None)


def difference_of(turn: DispatchedSamplingTask, prompt: Prompt, renderer: Renderer) -> str:
    """Return how a prompt differs from that of a recorded turn; empty if they are equal."""
    is_same_place = (turn.parent, turn.shared_len, turn.added_images) == (
        *(prompt.parent, prompt.shared_len, prompt.added_images),
    )
    if is_same_place and np.array_equal(turn.added_ids, prompt.added_ids):
        return ""
    if (turn.parent, turn.shared_len) != (prompt.parent, prompt.shared_len):
        return (
            f"it continued turn {turn.parent} after {turn.shared_len} tokens and would now "
            f"continue turn {prompt.parent} after {prompt.shared_len}"
        )
    recorded, rendered = turn.added_ids, prompt.added_ids
    first = num_shared_ids(recorded, rendered)
    start = max(0, first - _CONTEXT_TOKENS)
    before, after = (
        renderer.decode(ids[start : first + _CONTEXT_TOKENS]) for ids in (recorded, rendered)
    )
    return f"at token {first}, {before!r} became {after!r}"


def _with_results(
    turn: DispatchedSamplingTask, messages: Sequence[Message]
) -> DispatchedSamplingTask:
    """Return a turn with the tool results that the messages contain."""
    contents = {m.get("tool_call_id"): m["content"] for m in messages if m["role"] == "tool"}
    results = [
        replaced
        for result in turn.tool_results
        if (replaced := _with_content(result, contents.get(result.call_id))) is not None
    ]
    return turn.model_copy(update={"tool_results": tuple(results)})


def _with_content(result: ToolResult, content: object) -> ToolResult | None:
    """Return a result with new content; None if there is no content."""
    if content is None:
        return None
    if content == result_message(result)["content"]:
        return result
    return result.model_copy(update={"content": str(content), "images": ()})


def _calls(turn: DispatchedSamplingTask) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in turn.tool_calls]
