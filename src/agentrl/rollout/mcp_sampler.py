"""`MCPSampler`: a question, tools called over several turns, an answer that a scorer judges."""

import asyncio
from collections import Counter

from agentrl.errors import ConfigError
from agentrl.renderers.reply import Reply
from agentrl.rollout.base import AsyncSampler, LimitReached, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.conversation import Conversation
from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    Message,
    Record,
    Score,
    ToolCall,
    ToolResult,
)
from agentrl.tools import ToolBox

MAX_NUDGES = 3
"""Replies in a row with neither a tool call nor an answer, after which a rollout is given up."""


class MCPSampler(AsyncSampler[MCPTask]):
    """Plays an `MCPTask`.

    One turn after the other: the model replies; if the reply gives a final answer (by the task's
    answer schema, outside thinking and tool calls) the rollout is over; else its tool calls run in
    order and their results go into the context. A call that cannot be parsed is answered with the
    reason. A reply that does neither is answered with a reminder. Format errors and repeated
    replies carry the advantage override 0: they are never rewarded.
    """

    def __init__(self, task: MCPTask, record: Record, context: RolloutContext) -> None:
        super().__init__(task, record, context)
        if context.rollout.new_context != "disabled":
            raise ConfigError(
                f"new_context={context.rollout.new_context} is not supported yet; use disabled"
            )
        self._replies: Counter[str] = Counter()
        self._num_calls = 0
        self._num_nudges = 0

    async def run(self) -> RolloutResult:
        """Play turns until an answer or a limit."""
        async with self.context.toolbox.for_rollout() as tools:
            schemas = tuple(spec.openai() for spec in tools.specs)
            conversation = Conversation(self._opening(), schemas)
            try:
                return await self._play(conversation, tools)
            except LimitReached as limit:
                return RolloutResult(limit.outcome)

    async def evaluate_record(self, result: RolloutResult) -> Score:
        """Let the task's scorer judge the answer; a rollout without an answer scores 0."""
        if result.final_answer is None:
            return Score(scorer=self.task.scorer, value=0.0, detail=result.outcome)
        return await self.context.scoring.score(self.task, result.final_answer)

    async def _play(self, conversation: Conversation, tools: ToolBox) -> RolloutResult:
        for turn_number in range(1, self.context.rollout.max_turns + 1):
            turn, reply = await self.generate(conversation, judge=self._override)
            answer = self.context.scoring.extract_answer(reply.content, self.task.answer_schema)
            if answer is not None:
                return RolloutResult("answered", answer)
            if turn.finish_reason == "length":
                raise LimitReached("length_limit")
            if 0 < self.context.rollout.repetition_early_stop_times <= self._seen(reply):
                raise LimitReached("repetition")
            last = turn_number == self.context.rollout.max_turns
            if last:
                # What its tools would say could no longer be read by the model.
                break
            conversation.add(*await self._respond(reply, tools))
        raise LimitReached("turns_limit")

    def _override(self, turn: DispatchedSamplingTask, reply: Reply) -> float | None:
        self._replies[reply.text.strip()] += 1
        malformed = any(call.format_error is not None for call in turn.tool_calls)
        return 0.0 if malformed or self._seen(reply) > 1 else None

    def _seen(self, reply: Reply) -> int:
        return self._replies[reply.text.strip()]

    async def _respond(self, reply: Reply, tools: ToolBox) -> list[Message]:
        if reply.tool_calls:
            self._num_nudges = 0
            return await self._call_tools(reply.tool_calls, tools)
        self._num_nudges += 1
        if self._num_nudges >= MAX_NUDGES:
            raise LimitReached("no_answer")
        return [{"role": "user", "content": self._nudge()}]

    async def _call_tools(self, calls: tuple[ToolCall, ...], tools: ToolBox) -> list[Message]:
        """Run the calls one after the other: tools may keep state."""
        results: list[ToolResult] = []
        try:
            for call in calls:
                result = await self._call(call, tools)
                results.append(result)
        finally:
            # Also when a limit or an error ends the rollout: what was learnt stays readable.
            if results:
                self.attach_results(results)
        return [
            {
                "role": "tool",
                "tool_call_id": result.call_id,
                "name": result.name,
                "content": result.content,
            }
            for result in results
        ]

    async def _call(self, call: ToolCall, tools: ToolBox) -> ToolResult:
        if call.format_error is not None:
            return ToolResult(
                call_id=call.id,
                name=call.name,
                content=f"format error: {call.format_error}",
                is_error=True,
            )
        if self._num_calls >= self.context.rollout.max_tool_calls:
            raise LimitReached("tool_calls_limit")
        self._num_calls += 1
        recorded = self.recorded_result(call.id)
        if recorded is not None:
            return recorded
        try:
            async with asyncio.timeout(self.seconds_left()):
                return await tools.call(call.name, call.arguments, call_id=call.id)
        except TimeoutError:
            raise LimitReached("time_limit") from None

    def _opening(self) -> list[Message]:
        messages: list[Message] = []
        if self.task.system_prompt:
            messages.append({"role": "system", "content": self.task.system_prompt})
        messages.append({"role": "user", "content": self.task.query})
        return messages

    def _nudge(self) -> str:
        schema = self.task.answer_schema
        form = "\\boxed{}" if schema == "boxed" else f"<{schema}></{schema}>"
        return f"Call a tool, or answer inside {form}."
