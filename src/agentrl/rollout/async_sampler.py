"""`AsyncSampler`: one instance runs the rollout of one slot and stores every model call.

It knows servers, renderer and store through `RolloutContext`. Claims, leases and the writes that end
an attempt are the worker's.
"""

import asyncio
import hashlib
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np

from agentrl.errors import ConfigError, InferenceError
from agentrl.inference import GenerateRequest, GenerateResult, OnPartial
from agentrl.renderers.conversation import Conversation, Prompt
from agentrl.renderers.reply import Reply
from agentrl.renderers.untrusted_text import Tools
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.evaluated_route import EvaluatedRoute
from agentrl.rollout.recorded_turns import RecordedTurns, difference_of
from agentrl.rollout.turn_writes import TurnWrites
from agentrl.schema import (
    DispatchedSamplingTask,
    Message,
    Outcome,
    Record,
    SamplingParams,
    Score,
    Seat,
    Task,
    ToolCall,
    ToolResult,
)
from agentrl.schema.image import content_with_images, image_addresses
from agentrl.schema.routed_experts import first_routed, pack_experts

TaskType = TypeVar("TaskType", bound=Task)
_T = TypeVar("_T")
AdvantageOverride = Callable[[DispatchedSamplingTask, Reply], float | None]
_LONG_REPLY_TOKENS = 8192
"""Replies of this length or more are parsed in a thread."""
_QUOTED_CHARS = 80
_MAX_GROUP = 10_000
"""Most rollouts of a question."""


class LimitReached(Exception):
    """The rollout reached a limit, which `outcome` names. Ends the rollout, not the attempt.

    Control flow rather than an error, hence outside the error tree: a sampler's `run` turns it into
    a `RolloutResult`.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class BranchClosed(Exception):
    """The state of the world at a branch cannot be restored. Ends the branch, not the attempt.

    The slot is played from the question instead. Control flow, like `LimitReached`.
    """


@dataclass(frozen=True)
class RolloutResult:
    """How a rollout ended: its outcome, and the policy's final answer, if it gave one.

    Anything else that an agent or environment returns is stored with the Record.
    """

    outcome: Outcome
    final_answer: str | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AsyncSampler(ABC, Generic[TaskType]):
    """Runs the rollout of one slot of a Task.

    Subclasses implement `run` (call the model through `generate` until the rollout ends) and
    `evaluate_record` (the score). Everything that `generate` returns is already durable in the
    store, so a rollout that dies midway leaves a readable attempt. Infrastructure errors
    (`InferenceError`, `ToolError`, `StoreError`) must propagate: they end the attempt
    and never become a score.

    If the tools are declared resumable, another process resumes the rollout of a process that died
    (see `play_first`). Use a class that keeps state outside its turns only without that flag.

    Example:
        ```python
        class EchoSampler(AsyncSampler[EchoTask]):
            async def run(self) -> RolloutResult:
                conversation = Conversation([{"role": "user", "content": self.task.question}])
                turn, reply = await self.generate(conversation)
                return RolloutResult("answered", reply.content)

            async def evaluate_record(self, result: RolloutResult) -> Score:
                return Score(scorer="echo", value=float(result.final_answer == self.task.question))
        ```

    A group that branches (`--rollouts tree`) starts rollouts at turns of others. A class takes part
    if its tools are declared resumable, or if it sets `can_branch`.

    Attributes:
        can_branch: `run` can be taken to any turn of another rollout, although the tools keep
            state: every call passes through `result_of`, which makes it again, or `run` goes on from
            `restored` at turn `record.branch.turn` and raises `BranchClosed` without it.
        task: the question.
        record: the claimed slot, as of its claim.
        context: clients and settings that all rollouts of the process share.
        turns: the acknowledged turns of this attempt, in order.
    """

    can_branch: ClassVar[bool] = False

    def __init__(self, task: TaskType, record: Record, context: RolloutContext) -> None:
        self.task = task
        self.record = record
        self.context = context
        self._writes = TurnWrites(context.store, record)
        self.turns = self._writes.turns
        self.deadline = context.servers.clock.now() + context.rollout.rollout_timeout_seconds
        """When the rollout times out, on the clock of the servers."""
        self._num_requests = 0
        self._recorded = RecordedTurns()
        # By turn: tokens that its images take in the server's prompt beyond their placeholders.
        self._image_tokens: dict[int, int] = {}

    def play_first(self, recorded: RecordedTurns) -> None:
        """Resume an attempt, or start at a turn of another Record instead of at the question.

        `run` starts from the beginning, but `generate` returns these turns instead of asking a
        server, and `result_of` the results of their tools, until they are used up. A rollout whose
        next step depends on these alone arrives where the other one stopped.
        """
        self._recorded = recorded

    @abstractmethod
    async def run(self) -> RolloutResult:
        """Run the rollout to its end."""

    @abstractmethod
    async def evaluate_record(self, result: RolloutResult) -> Score | float:
        """Return the score of a finished rollout, or its value alone.

        Called right after `run`, and again (on a fresh instance without turns) when the first
        attempt at scoring failed.

        Raises:
            ScoringError: the scorer could not decide; scoring is retried later.
        """

    async def create_chat_completions(self, *_: object, **__: object) -> NoReturn:
        """Reject the call that sampler classes of the original AgentRL made to the model.

        Raises:
            ConfigError: always; the message names the replacement.
        """
        raise ConfigError(
            "create_chat_completions is unsupported: call `turn, reply = await "
            "self.generate(conversation)`; make the conversation once, by "
            "`Conversation(messages, tools=tools)`, and `conversation.add` what the model sees "
            "next"
        )

    async def generate(
        self,
        conversation: Conversation,
        *,
        advantage_override: AdvantageOverride | None = None,
        min_room: int = 1,
        **sampling: Any,
    ) -> tuple[DispatchedSamplingTask, Reply]:
        """Request the model's reply to a conversation, and store the turn.

        The prompt is the ids of the conversation's last turn, as sampled, followed by what was
        added since. The turn is durable when this returns.

        Args:
            conversation: the model's input; the reply is appended to it.
            advantage_override: returns the turn's advantage override (0 for a format error), or None.
            min_room: tokens that must be left for the reply; with less, the context is full.
            **sampling: fields of `SamplingParams` that differ from the configuration.

        Returns:
            The stored turn, and its parsed reply.

        Raises:
            LimitReached: the prompt is too long, or the rollout timed out; nothing was stored.
            InferenceError: no server replied.
            LeaseLost: another process owns the slot by now.
            RenderError: a resumed attempt renders a different prompt than the recorded one.
        """
        if self.context.evaluated_route is not None:
            return await self._ask_route(self.context.evaluated_route, conversation)
        if not self.context.may_fit(conversation.pending, conversation.tools):
            raise LimitReached("length_limit")
        prompt = self._recorded.prompt(len(self.turns), conversation, self.context.renderer)
        if len(self.turns) < len(self._recorded.turns):
            turn, reply = await self._replay_turn(advantage_override)
        else:
            turn, reply = await self.sample(
                prompt,
                messages=conversation.pending,
                tools=conversation.tools,
                advantage_override=advantage_override,
                min_room=min_room,
                **sampling,
            )
        full_ids = np.concatenate([prompt.ids, turn.output_ids]).astype(np.int32)
        conversation.replied(turn.index, full_ids, reply.message)
        return turn, reply

    async def _ask_route(
        self, route: EvaluatedRoute, conversation: Conversation
    ) -> tuple[DispatchedSamplingTask, Reply]:
        """Request the reply of the model that is evaluated in the place of the policy."""
        started_at = self.now()
        added = conversation.pending
        sampling = self.context.sampling_params(self.task.split)
        addresses = tuple(dict.fromkeys(image_addresses(conversation.history)))
        images = dict(zip(addresses, await self.context.images.inlined(addresses), strict=True))
        answered = await self.within_time(route.reply(conversation, sampling, images))
        parent = conversation.last_turn
        results = () if parent is None else self.turns[parent.index].tool_results
        turn = await self.note_call(
            parent=None if parent is None else parent.index,
            added_messages=tuple(m for m in added if not _is_result(m, results)),
            tools=tuple(dict(tool) for tool in conversation.tools) if parent is None else (),
            **answered.fields(),
            branch_reason=conversation.branch_reason,
            model=route.name,
            server=route.server,
            started_at=started_at,
        )
        conversation.replied(turn.index, np.empty(0, dtype=np.int32), answered.message)
        return turn, answered.parsed()

    async def sample(
        self,
        prompt: Prompt,
        *,
        messages: Sequence[Message] = (),
        tools: Tools = (),
        advantage_override: AdvantageOverride | None = None,
        min_room: int = 1,
        on_partial: OnPartial | None = None,
        seat: Seat | None = None,
        **sampling: Any,
    ) -> tuple[DispatchedSamplingTask, Reply]:
        """Request the continuation of a prompt, and store the turn; `generate` wraps this method.

        Several calls may run concurrently: each becomes a turn when its reply arrives. If the
        caller is cancelled while its turn is being stored, the turn is stored all the same.

        Args:
            prompt: the ids, int32 [P], and how they continue an earlier turn.
            messages: the messages that the prompt adds to the turn it continues.
            tools: schemas of the tools that the prompt shows.
            advantage_override: see `generate`.
            min_room: see `generate`.
            on_partial: receives the growing reply.
            seat: the agent that calls, in a rollout of several.
            **sampling: see `generate`.

        Raises:
            LimitReached: see `generate`, like the other errors.
        """
        num_extra = 0 if prompt.parent is None else self._image_tokens.get(prompt.parent, 0)
        overrides = {**self._recorded.sampling, **sampling}
        params = self._sampling_params(len(prompt.ids) + num_extra, min_room, overrides)
        number = self._num_requests
        self._num_requests += 1
        if params.seed is None:
            params = params.model_copy(update={"seed": self._seed(number)})
        snapshot = await self._kept_snapshot()
        started_at = self.now()
        request = GenerateRequest(
            input_ids=prompt.ids,
            sampling=params,
            priority=self._priority,
            image_data=await self.context.images.inlined(prompt.images),
            routed_from=first_routed(prompt.shared_len) if self.context.router_replay else None,
        )
        result = await self._request_reply(request, on_partial)
        reply_ids = prompt.reply_ids(result.output_ids)
        parse = partial(self.context.renderer.parse, reply_ids, turn=number, tools=tools)
        # All rollouts share the event loop.
        is_long = len(reply_ids) >= _LONG_REPLY_TOKENS
        reply = await asyncio.to_thread(parse) if is_long else parse()
        stored_results = self._stored_results(prompt)
        turn = self._new_turn(
            parent=prompt.parent,
            shared_len=prompt.shared_len,
            added_ids=prompt.added_ids,
            shared_images=prompt.shared_images,
            added_images=prompt.added_images,
            **self.context.renderer.image_fields(prompt.added_images),
            prompt_positions=result.prompt_tokens,
            output_ids=result.output_ids,
            output_logprobs=result.output_logprobs,
            version_spans=result.version_spans,
            **_routed_experts(request, result),
            added_messages=tuple(m for m in messages if not _is_result(m, stored_results)),
            tools=tuple(dict(tool) for tool in tools) if prompt.parent is None else (),
            output_text=reply.text,
            tool_calls=reply.tool_calls,
            finish_reason=result.finish_reason,
            branch_reason=prompt.branch_reason,
            seat=seat,
            snapshot=snapshot,
            sampling_params=params,
            server=result.server,
            cached_tokens=result.cached_tokens,
            num_retractions=result.num_retractions,
            started_at=started_at,
        )
        if advantage_override is not None:
            turn = turn.model_copy(update={"advantage": advantage_override(turn, reply)})
        turn = await self._append(turn)
        if prompt.images:
            self._image_tokens[turn.index] = max(0, result.prompt_tokens - len(prompt.ids))
        return turn, reply

    async def _request_reply(
        self, request: GenerateRequest, on_partial: OnPartial | None
    ) -> GenerateResult:
        """Return a server's result for a request, within the rollout's time."""
        record, servers = self.record, self.context.servers
        generation = servers.generate(record.id, request, on_partial, group=record.task_id)
        try:
            result = await self.within_time(generation)
        except LimitReached:
            if self.turns:
                raise
            # The policy has sampled nothing yet: the servers failed, not the policy.
            seconds = self.context.rollout.rollout_timeout_seconds
            raise InferenceError(
                f"no reply to {record.id} within rollout_timeout_seconds={seconds:g}"
            ) from None
        if result.finish_reason == "abort":
            raise InferenceError(f"{result.server} aborted a generation for {record.id}")
        return result

    async def note_call(self, **fields: Any) -> DispatchedSamplingTask:
        """Store a call of a model that is not trained, as a turn without tokens; durable on return.

        Args:
            **fields: known fields of the turn.
        """
        empty = np.empty(0, dtype=np.int32)
        return await self._append(
            self._new_turn(
                added_ids=empty,
                output_ids=empty,
                output_logprobs=empty,
                version_spans=(),
                sampling_params=SamplingParams(),
                trainable=False,
                **fields,
            )
        )

    async def _append(self, turn: DispatchedSamplingTask) -> DispatchedSamplingTask:
        """Store a turn that ends now; the write continues if the caller is cancelled."""
        finished_at = max(turn.started_at, self.now())
        return await self._writes.append(turn.model_copy(update={"finished_at": finished_at}))

    def now(self) -> datetime:
        """Return the database server's time, which dates records and turns."""
        return self.context.store.clock.now()

    async def _replay_turn(
        self, advantage_override: AdvantageOverride | None
    ) -> tuple[DispatchedSamplingTask, Reply]:
        turn = self._recorded.turns[len(self.turns)]
        reply = self.context.renderer.parse(turn.output_ids, turn=turn.index)
        if advantage_override is not None:
            advantage_override(
                turn, reply
            )  # called for its side effects; the turn already has its result
        if self._recorded.is_own(turn.index):
            self.turns.append(turn)
        else:
            turn = await self._writes.append(turn.model_copy(update=self._ownership()))
        self._num_requests += 1
        return turn, reply

    async def replayed(
        self, prompt: Prompt, *, tools: Tools = (), seat: Seat | None = None
    ) -> tuple[DispatchedSamplingTask, Reply] | None:
        """Return the recorded turn that answers a program's call before a branch; None behind it.

        The program runs from its beginning, so its own state is where the parent's was if all its
        calls up to the branch are the parent's.

        Args:
            prompt: that of the call.
            tools: see `sample`.
            seat: see `sample`.

        Raises:
            BranchClosed: the call differs from the parent's.
            LeaseLost: another process owns the slot by now.
        """
        number = self._num_requests
        parent = self._recorded.parent_turn(number)
        if parent is None:
            return None
        if seat is not None or parent.seat is not None:
            raise BranchClosed("the rollout has several agents, whose calls have no fixed order")
        difference = difference_of(parent, prompt, self.context.renderer)
        if difference:
            raise BranchClosed(
                f"turn {number} was to be sampled again, and the prompt that leads there differs: "
                f"{difference}"
            )
        if number == len(self._recorded.turns):
            return None
        self._num_requests += 1
        reply_ids = prompt.reply_ids(parent.output_ids)
        reply = self.context.renderer.parse(reply_ids, turn=number, tools=tools)
        return await self._writes.append(parent.model_copy(update=self._ownership())), reply

    async def snapshot(self) -> bytes | None:
        """Return the state of the tools or the environment before the next turn; for subclasses.

        In groups that branch, it is called before every turn but the first, and stored. A rollout
        that leaves this one at the turn gets it as `restored`, in any sampler process.

        Returns:
            None if there is none, or it is too large: a branch repeats the calls then.
        """
        return None

    @property
    def restored(self) -> bytes | None:
        """The parent's `snapshot` at the turn where this rollout leaves it, if there is one."""
        return self._recorded.state

    async def _kept_snapshot(self) -> str:
        """Store a snapshot if a rollout may start at the next turn; return its address."""
        if not (self.turns and self.context.has_trees and self.task.split == "train"):
            return ""
        state = await self.snapshot()
        return "" if state is None else await self.context.store.snapshots.put(state)

    async def result_of(
        self, call: ToolCall, make: Callable[[], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Return the result of a call of the last turn: the recorded one, or that of `make`.

        Before a branch, tools that keep state are called although the result is recorded, and must
        return it again.

        Args:
            call: the call.
            make: makes it.

        Raises:
            BranchClosed: the result differs from the recorded one.
            LimitReached: the rollout timed out.
            ToolError: the rollout is a fork, and the tools cannot be called in the middle of it.
        """
        recorded = self._recorded.result(self.turns[-1], call)
        if recorded is not None and not self._recorded.replays_calls:
            return recorded
        result = await self.within_time(make())
        if recorded is None:
            return result
        if _seen(result) != _seen(recorded):
            raise BranchClosed(
                f"turn {self.turns[-1].index} called {call.name} again, and the result differs: "
                f"{_short(result.content)} instead of {_short(recorded.content)}"
            )
        return recorded

    def attach_results(self, results: Sequence[ToolResult], turn_index: int = -1) -> None:
        """Store the tool results of a turn, the last one by default.

        The write runs in the background: the next `generate` waits for it before it returns its
        turn, and `finish` before the Record is finished.
        """
        self._writes.attach_results(results, turn_index)

    def reward_turns(
        self, rewards: Mapping[int, float], seats: Mapping[int, Seat] = MappingProxyType({})
    ) -> None:
        """Store the rewards of turns, and what their seats earned, by index; `finish` waits."""
        self._writes.reward(rewards, seats)

    async def finish(self) -> None:
        """Wait until every write of this rollout is durable."""
        await self._writes.finish()

    async def discard(self) -> None:
        """Cancel the pending writes: the attempt ended before the rollout did."""
        await self._writes.discard()

    async def within_time(self, work: Awaitable[_T]) -> _T:
        """Await work of the rollout, at most until its `deadline`.

        Raises:
            LimitReached: the rollout timed out.
        """
        try:
            async with self.context.servers.clock.timeout_at(self.deadline):
                return await work
        except TimeoutError:
            raise LimitReached("time_limit") from None

    def _sampling_params(
        self, prompt_len: int, min_room: int, overrides: dict[str, Any]
    ) -> SamplingParams:
        context = self.context
        if prompt_len > context.sampling.max_prompt_tokens:
            raise LimitReached("length_limit")
        params = context.sampling_params(self.task.split, **overrides)
        room = params.max_new_tokens
        if context.context_length is not None:
            # One token short of the context: some servers refuse a request that fills it.
            room = min(room, context.context_length - prompt_len - 1)
        if room < min_room:
            raise LimitReached("length_limit")
        return params.model_copy(update={"max_new_tokens": room})

    @property
    def _priority(self) -> int:
        """Groups go in the order in which they are claimed, and rollouts in that of their group."""
        return -(self.record.order * _MAX_GROUP + self.record.traj_id)

    def _seed(self, number: int) -> int:
        """Derive a seed that differs between Records, attempts and calls, but not between runs."""
        name = f"{self.context.seed}/{self.record.id}/{self.record.attempt}/{number}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1

    def _stored_results(self, prompt: Prompt) -> tuple[ToolResult, ...]:
        """Return the tool results stored with the turn that a prompt continues."""
        if prompt.parent is None or prompt.rewritten:
            return ()
        return self.turns[prompt.parent].tool_results

    def _new_turn(self, **fields: Any) -> DispatchedSamplingTask:
        """Return a turn of this attempt; its id and index follow when it is stored."""
        return DispatchedSamplingTask(id="", index=len(self.turns), **self._ownership(), **fields)

    def _ownership(self) -> dict[str, Any]:
        """Return the fields that identify a turn's owner."""
        record = self.record
        return {"record_id": record.id, "task_id": record.task_id, "attempt": record.attempt}


def _seen(result: ToolResult) -> tuple[str, bool, tuple[str, ...]]:
    """Return what the model sees of a result."""
    return result.content, result.is_error, result.images


def _short(text: str) -> str:
    return repr(textwrap.shorten(text, _QUOTED_CHARS, placeholder="..."))


def _routed_experts(request: GenerateRequest, result: GenerateResult) -> dict[str, Any]:
    """Return the fields of a turn that hold the experts its tokens were routed to.

    Raises:
        InferenceError: they were requested, but the server did not return them for every token.
    """
    if request.routed_from is None:
        return {}
    num_tokens = len(request.input_ids) + len(result.output_ids) - 1 - request.routed_from
    choices = np.frombuffer(result.routed_experts, dtype="<i4")
    if not len(choices) or len(choices) % num_tokens:
        raise InferenceError(
            f"--router_replay: {result.server} returned {len(choices)} experts for {num_tokens} "
            "tokens; start SGLang with --enable-return-routed-experts"
        )
    packed, size = pack_experts(choices)
    return {"routed_experts": packed, "routed_bytes": size}


def _is_result(message: Message, results: Sequence[ToolResult]) -> bool:
    """Return whether a message is one of these tool results."""
    return message.get("role") == "tool" and any(
        (result.call_id, content_with_images(result.content, result.images))
        == (message.get("tool_call_id"), message.get("content"))
        for result in results
    )
