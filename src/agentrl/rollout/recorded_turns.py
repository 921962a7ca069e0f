"""Turns that a rollout replays before it samples: of a resumed attempt, or before a fork or branch.

A rollout's `run` starts from the beginning; `AsyncSampler.generate` looks up each prompt here and
uses the recorded turns as replies until none are left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class ResumedTurns:
    """The durable turns of an attempt whose holder died or released it.

    This process must render exactly the prompts that they were sampled from: it continues where
    they end, from messages that it builds itself.
    """

    turns: tuple[DispatchedSamplingTask, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    replays_calls = False
    state = None

    def is_own(self, index: int) -> bool:
        """Return whether a recorded turn already belongs to this attempt."""
        return True

    def parent_turn(self, index: int) -> DispatchedSamplingTask | None:
        """Return None: there is no parent."""
        return None

    def prompt(self, index: int, conversation: Conversation, renderer: Renderer) -> Prompt:
        """Return the prompt of turn `index`."""
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
        """Return the recorded result of a call of the last turn, if there is one."""
        return _result_of(turn, call.id)


class ForkPoint:
    """A turn from which a rollout is sampled again, and what changes there.

    Prompts up to the fork are the stored ids, even if a template or tokenizer would encode their
    texts differently today.

    Attributes:
        turns: the parent's turns before the fork, their results as edited.
        sampling: parameters of all new turns.
        first_sampling: additional parameters of the first.
    """

    replays_calls = False
    state = None

    def __init__(
        self,
        parent: Sequence[DispatchedSamplingTask],
        turn: int,
        *,
        messages: Sequence[Message] | None = None,
        sampling: Mapping[str, Any] | None = None,
        tools_keep_state: bool,
    ) -> None:
        """Mark the fork."""
        check_fork_turn(parent, turn)
        self.turn = turn
        self.messages = None if messages is None else tuple(messages)
        self.turns = tuple(parent[:turn])
        if messages is not None and turn:
            self.turns = (*self.turns[:-1], _with_results(self.turns[-1], messages))
        own = parent[turn].sampling_params
        kept = own.model_dump(exclude=_PER_CALL_SAMPLING)
        self.sampling = {**kept, **(sampling or {})}
        self.first_sampling = {"grammar": own.grammar, "stop": own.stop}
        self._parent = tuple(parent)
        self._tools_keep_state = tools_keep_state
        self._same_calls = True
        self._prompts = rebuild_prompts(parent[: turn + 1])
        self._images = rebuild_images(parent[: turn + 1])

    def parent_turn(self, index: int) -> DispatchedSamplingTask | None:
        """Return None: the prompts of a fork may differ from the parent's."""
        return None

    def is_own(self, index: int) -> bool:
        """Return False: the turns are the parent's and are stored again as this attempt's."""
        return False

    def prompt(self, index: int, conversation: Conversation, renderer: Renderer) -> Prompt:
        """Return the prompt of turn `index`: up to the fork the stored one."""
        if index == 0:
            conversation.tools = self._parent[0].tools
        is_edited = index == self.turn and self.messages is not None
        if self.messages is not None and is_edited:
            conversation.pending = list(self.messages)
        if index > self.turn or is_edited:
            return conversation.next_prompt(renderer)
        turn = self._parent[index]
        return Prompt(
            self._prompts[index],
            turn.parent,
            turn.shared_len,
            turn.branch_reason,
            images=self._images[index],
            shared_images=turn.shared_images,
        )

    def result(self, turn: DispatchedSamplingTask, call: ToolCall) -> ToolResult | None:
        """Return a recorded result: always before the fork; after it only if tools keep state."""
        if turn.index < self.turn:
            return _result_of(turn, call.id)
        if not self._tools_keep_state:
            return None
        recorded = self._parent[turn.index] if turn.index < len(self._parent) else None
        self._same_calls &= recorded is not None and _calls(recorded) == _calls(turn)
        if recorded is not None and self._same_calls:
            position = turn.tool_calls.index(call)
            found = _result_of(recorded, recorded.tool_calls[position].id)
            if found is not None:
                return found.model_copy(update={"call_id": call.id})
        raise ToolError(
            f"cannot be forked after turn {turn.index}: the result of its call to {call.name} was "
            "not recorded, and the tools may keep state; set --resumable_tools true if they keep "
            "none"
        )


class BranchTurns:
    """The turns of another Record before a branch, and those that the branch already has.

    Attributes:
        replays_calls: the tools keep state: the calls before the branch are made again, so that the
            rollout's own tools are where the parent's were.
        state: what the parent's `AsyncSampler.snapshot` returned before the turn; None without one.
    """

    def __init__(
        self,
        parent: Sequence[DispatchedSamplingTask],
        turn: int,
        own: Sequence[DispatchedSamplingTask] = (),
        *,
        replays_calls: bool,
        state: bytes | None = None,
    ) -> None:
        """Mark the branch.

        Args:
            parent: all turns of the parent's attempt.
            turn: index of the first turn that is sampled again.
            own: the turns of this attempt, if another process began it.
            replays_calls: see the attribute.
            state: see the attribute.
        """
        self._start = ForkPoint(parent, turn, tools_keep_state=False)
        self._own = ResumedTurns(tuple(own))
        self.turns = (*own, *self._start.turns[len(own) :])
        self.sampling: Mapping[str, Any] = {}
        self.replays_calls = replays_calls
        self.state = state
        self._parent = tuple(parent[: turn + 1])

    def parent_turn(self, index: int) -> DispatchedSamplingTask | None:
        """Return the parent's turn whose prompt turn `index` has too; None behind the branch."""
        return self._parent[index] if index < len(self._parent) else None

    def is_own(self, index: int) -> bool:
        """Return whether a recorded turn already belongs to this attempt."""
        return index < len(self._own.turns)

    def prompt(self, index: int, conversation: Conversation, renderer: Renderer) -> Prompt:
        """Return the prompt of turn `index`: up to the branch the stored one."""
        source = self._start if index <= self._start.turn else self._own
        return source.prompt(index, conversation, renderer)

    def result(self, turn: DispatchedSamplingTask, call: ToolCall) -> ToolResult | None:
        """Return the recorded result of a call: the parent's before the branch, then its own."""
        return (self._start if turn.index < self._start.turn else self._own).result(turn, call)


RecordedTurns = ResumedTurns | ForkPoint | BranchTurns


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
