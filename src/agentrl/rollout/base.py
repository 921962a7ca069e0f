"""`AsyncSampler`: one instance plays one slot, and writes every model call as it happens."""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from agentrl.errors import InferenceError, RenderError
from agentrl.inference import GenerateRequest, GenerateResult
from agentrl.renderers.reply import Reply
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.conversation import Conversation, Prompt
from agentrl.schema import (
    DispatchedSamplingTask,
    Outcome,
    Record,
    SamplingParams,
    Score,
    Task,
    ToolResult,
    utc_now,
)

TaskType = TypeVar("TaskType", bound=Task)
Judge = Callable[[DispatchedSamplingTask, Reply], float | None]


class LimitReached(Exception):
    """A limit of the rollout was met; its outcome says which. Ends the rollout, not the attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True)
class RolloutResult:
    """How a rollout ended: its outcome, and the answer that the policy gave, if any."""

    outcome: Outcome
    final_answer: str | None = None


class AsyncSampler(ABC, Generic[TaskType]):
    """Plays one slot of a Task.

    Subclasses implement `run` (talk to the model through `generate` until the rollout ends) and
    `evaluate_record` (the score). Everything that `generate` returns is already durable in the
    store, so a rollout that dies in the middle leaves a readable attempt behind. Errors of the
    infrastructure (`InferenceError`, `ToolError`, `StoreError`) must be left to propagate: they end
    the attempt and never become a score.

    Where the tools are declared resumable, a rollout whose process died is taken up by another (see
    `take_up`); a sampler that keeps state outside its turns belongs to runs without that flag.

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

    Attributes:
        task: the question.
        record: the claimed slot, as it was when it was claimed.
        context: clients and settings that all rollouts of the process share.
        turns: the acknowledged turns of this attempt, in order.
    """

    def __init__(self, task: TaskType, record: Record, context: RolloutContext) -> None:
        self.task = task
        self.record = record
        self.context = context
        self.turns: list[DispatchedSamplingTask] = []
        self.deadline = time.monotonic() + context.rollout.rollout_timeout_seconds
        self._results_written: asyncio.Task[None] | None = None
        self._recorded: tuple[DispatchedSamplingTask, ...] = ()
        self._image_tokens = 0  # which the last prompt was longer by for the server than for us

    def take_up(self, turns: Sequence[DispatchedSamplingTask]) -> None:
        """Go on with an attempt whose holder died or handed it back.

        `run` plays it again from its beginning, but `generate` gives these turns back instead of
        asking a server, and `recorded_result` the results of their tools, until there are none
        left. A sampler whose next step follows from those alone ends up where the other one was.

        Args:
            turns: the durable turns of the attempt, in order.
        """
        self._recorded = tuple(turns)

    @abstractmethod
    async def run(self) -> RolloutResult:
        """Play the slot to its end."""

    @abstractmethod
    async def evaluate_record(self, result: RolloutResult) -> Score:
        """Return the score of a finished rollout.

        Called right after `run`, and again (on a fresh instance without turns) when the first
        attempt at scoring failed.

        Raises:
            ScoringError: no verdict could be had; it is tried again later.
        """

    async def generate(
        self,
        conversation: Conversation,
        *,
        judge: Judge | None = None,
        min_room: int = 1,
        **sampling: Any,
    ) -> tuple[DispatchedSamplingTask, Reply]:
        """Let the model reply to a conversation, and store the turn.

        The prompt is the ids of the conversation's last turn, as sampled, followed by what was
        added since. The turn is durable when this returns.

        Args:
            conversation: what the model sees; the reply is appended to it.
            judge: returns the turn's advantage override (0 for a format error), or None.
            min_room: tokens that must be left for the reply; with less, the context is full.
            **sampling: fields of `SamplingParams` that differ from the configuration.

        Returns:
            The stored turn, and what its output says.

        Raises:
            LimitReached: the prompt is too long, or the rollout's time is up; nothing was stored.
            InferenceError: no server replied.
            LeaseLost: another process owns the slot by now.
            RenderError: the attempt was taken up, and what was played before does not come out.
        """
        renderer = self.context.renderer
        prompt = conversation.next_prompt(renderer)
        if len(self.turns) < len(self._recorded):
            return self._play_recorded(conversation, prompt, judge)
        params = self._params(len(prompt.ids) + self._image_tokens, min_room, sampling)
        started_at = utc_now()
        request = GenerateRequest(
            input_ids=prompt.ids,
            sampling=params,
            image_data=await self.context.images.inlined(prompt.images),
        )
        result = await self._within_time(self.context.servers.generate(self.record.id, request))
        if prompt.images:
            self._image_tokens = max(0, result.prompt_tokens - len(prompt.ids))
        if result.finish_reason == "abort":
            raise InferenceError(f"{result.server} gave up on a generation of {self.record.id}")
        reply = renderer.parse(result.output_ids, turn=len(self.turns), tools=conversation.tools)
        turn = self._turn(conversation, prompt, params, result, reply)
        turn = turn.model_copy(update={"started_at": started_at})
        if judge is not None:
            turn = turn.model_copy(update={"advantage": judge(turn, reply)})
        await self._flush_results()
        await self.context.store.append_turn(turn, self.record.fence)
        self.turns.append(turn)
        full_ids = np.concatenate([prompt.ids, result.output_ids]).astype(np.int32)
        conversation.replied(turn.index, full_ids, reply.message)
        return turn, reply

    def _play_recorded(
        self, conversation: Conversation, prompt: Prompt, judge: Judge | None
    ) -> tuple[DispatchedSamplingTask, Reply]:
        turn = self._recorded[len(self.turns)]
        same = (turn.parent, turn.shared_len, turn.added_images) == (
            *(prompt.parent, prompt.shared_len, prompt.added_images),
        )
        if not (same and np.array_equal(turn.added_ids, prompt.added_ids)):
            raise RenderError(
                f"{self.record.id} cannot be taken up: its turn {turn.index} was sampled from a "
                "prompt that does not come out again (other tools, template or sampler)"
            )
        reply = self.context.renderer.parse(turn.output_ids, turn=turn.index)
        if judge is not None:
            judge(turn, reply)  # for what it remembers; its verdict is in the turn
        self.turns.append(turn)
        full_ids = np.concatenate([prompt.ids, turn.output_ids]).astype(np.int32)
        conversation.replied(turn.index, full_ids, reply.message)
        return turn, reply

    def recorded_result(self, call_id: str) -> ToolResult | None:
        """Return what a call of the last turn led to when the turn was taken up, if it is known."""
        return next((r for r in self.turns[-1].tool_results if r.call_id == call_id), None)

    def attach_results(self, results: Sequence[ToolResult]) -> None:
        """Store the last turn's tool results.

        The write runs beside what follows; the next `generate` waits for it before it stores the
        next turn, and `finish` before the Record is finished.
        """
        if self.turns[-1].tool_results == tuple(results):
            return  # taken up together with its turn
        turn = self.turns[-1].model_copy(update={"tool_results": tuple(results)})
        self.turns[-1] = turn
        self._results_written = asyncio.create_task(
            self.context.store.set_tool_results(
                turn.id, self.record.id, self.record.fence, turn.tool_results
            )
        )

    async def finish(self) -> None:
        """Wait until everything that this rollout wrote is durable."""
        await self._flush_results()

    async def discard(self) -> None:
        """Stop writing: the attempt is over for another reason than the rollout's end."""
        write, self._results_written = self._results_written, None
        if write is not None:
            write.cancel()
            await asyncio.wait([write])
            if not write.cancelled():
                write.exception()  # looked at, so that it is not reported as forgotten

    async def _flush_results(self) -> None:
        write, self._results_written = self._results_written, None
        if write is not None:
            await write

    async def _within_time(self, work: Awaitable[GenerateResult]) -> GenerateResult:
        try:
            async with asyncio.timeout(self.seconds_left()):
                return await work
        except TimeoutError:
            if not self.turns:
                seconds = self.context.rollout.rollout_timeout_seconds
                raise InferenceError(
                    f"no reply to {self.record.id} within rollout_timeout_seconds={seconds:g}"
                ) from None
            raise LimitReached("time_limit") from None

    def seconds_left(self) -> float:
        """Return how much of the rollout's wall clock is left, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def _params(self, prompt_len: int, min_room: int, overrides: dict[str, Any]) -> SamplingParams:
        context = self.context
        if prompt_len > context.sampling.max_prompt_tokens:
            raise LimitReached("length_limit")
        params = context.sampling_params(self.task.split, **overrides)
        room = params.max_new_tokens
        if context.context_length is not None:
            # One less than there is: some servers refuse a request that fills the context.
            room = min(room, context.context_length - prompt_len - 1)
        if room < min_room:
            raise LimitReached("length_limit")
        seed = params.seed if params.seed is not None else self._seed()
        return params.model_copy(update={"max_new_tokens": room, "seed": seed})

    def _seed(self) -> int:
        """Derive a seed that differs between tries, attempts and turns, but not between runs."""
        name = f"{self.context.seed}/{self.record.id}/{self.record.attempt}/{len(self.turns)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1

    def _turn(
        self,
        conversation: Conversation,
        prompt: Prompt,
        params: SamplingParams,
        result: GenerateResult,
        reply: Reply,
    ) -> DispatchedSamplingTask:
        index = len(self.turns)
        return DispatchedSamplingTask(
            id=f"{self.record.id}/{self.record.fence}/{index}",
            record_id=self.record.id,
            task_id=self.record.task_id,
            attempt=self.record.attempt,
            index=index,
            parent=prompt.parent,
            shared_len=prompt.shared_len,
            added_ids=prompt.added_ids,
            shared_images=prompt.shared_images,
            added_images=prompt.added_images,
            output_ids=result.output_ids,
            output_logprobs=result.output_logprobs,
            version_spans=result.version_spans,
            added_messages=tuple(m for m in conversation.pending if m.get("role") != "tool"),
            tools=conversation.tools if prompt.parent is None else (),
            output_text=reply.text,
            tool_calls=reply.tool_calls,
            finish_reason=result.finish_reason,
            branch_reason=prompt.branch_reason,
            sampling_params=params,
            server=result.server,
            cached_tokens=result.cached_tokens,
            num_retractions=result.num_retractions,
        )
