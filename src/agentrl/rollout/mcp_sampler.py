"""`MCPSampler`: a question, tool calls over several turns, an answer for a scorer."""

import asyncio
from collections import Counter
from functools import partial
from typing import ClassVar

from agentrl.errors import RenderError, ScoringError
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.reply import Reply
from agentrl.rollout.async_sampler import AsyncSampler, LimitReached, RolloutResult
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.context_edits import (
    as_text,
    only_the_opening,
    without_repetitions,
    without_tool_results,
)
from agentrl.rollout.world import judged_in_world, score_rollout
from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    Message,
    Record,
    Score,
    ToolCall,
    ToolResult,
)
from agentrl.schema.answer_form import added_instruction, written
from agentrl.schema.image import content_with_images, question_content
from agentrl.tools import ToolBox

REMINDERS_WITH_TOOLS = 2
"""Default of `max_reminders` in a rollout with tools; without tools, a rollout has one turn."""

CONTEXT_RESERVE = 1024
"""With fewer tokens left for a reply, a context that may be renewed counts as full."""


class MCPSampler(AsyncSampler[MCPTask]):
    """Runs the rollout of an `MCPTask`.

    Turn by turn, the model replies. A reply with a final answer (by the task's answer schema,
    outside thinking and tool calls) ends the rollout; otherwise its tool calls run in order and
    their results are added to the context. A call that cannot be parsed is answered with the
    reason. A reply that does neither is answered with a reminder, `max_reminders` times in a row.
    Without tools, there is nothing to call: the first reply ends the rollout, unless reminders are
    configured. Format errors and repeated replies carry the advantage override 0: they are never
    rewarded.

    With `new_context`, a full context does not end the rollout: the part that `context_edits` keeps
    is rendered again, and the next turn branches off the token tree where the two still agree, with
    the mode as its `branch_reason`. The earlier turns stay part of the Record and are trained on.
    """

    can_branch: ClassVar[bool] = True

    def __init__(self, task: MCPTask, record: Record, context: RolloutContext) -> None:
        super().__init__(task, record, context)
        self._replies: Counter[str] = Counter()
        self._num_calls = 0
        self._num_reminders = 0
        self._summary: str | None = None
        self._question: Message = {"role": "user", "content": task.query}
        self._num_images = 0
        self._instructions = ""
        self._tools = context.toolbox
        self._judged: Score | ScoringError | None = None

    async def run(self) -> RolloutResult:
        """Run turns until there is an answer or a limit is reached."""
        self.context.check_scorer(self.task)
        question = self.context.served_question(self.task, self.record.id)
        async with self.context.toolbox.for_rollout(question, restored=self.restored) as tools:
            self._tools = tools
            self._instructions = tools.instructions
            self._question = await self._question_message()
            schemas = tuple(spec.openai() for spec in tools.specs)
            conversation = Conversation(self._opening(), schemas)
            try:
                result = await self._run_turns(conversation, tools)
            except LimitReached as limit:
                result = RolloutResult(limit.outcome)
            result = await self.close_tools(result, tools)
            if self.context.judges_rollouts(self.task):
                self._judged = await judged_in_world(self, result, tools)
            return result

    async def snapshot(self) -> bytes | None:
        """Return the state of the tools, if all of it is in folders (`"state": "folder"`)."""
        return await asyncio.to_thread(self._tools.snapshot)

    async def close_tools(self, result: RolloutResult, tools: ToolBox) -> RolloutResult:
        """Return the result of the rollout, while its tools still keep their state; for subclasses."""
        return result

    async def evaluate_record(self, result: RolloutResult) -> Score:
        """Score the answer with the task's scorer; a rollout without an answer scores 0.

        A scorer that takes the rollout has decided while its tools were open; what another process
        scores later is the rollout as it is stored.
        """
        judged, self._judged = self._judged, None
        if isinstance(judged, Score):
            return judged
        if judged is not None:
            raise judged
        return await score_rollout(self, result, result.outcome)

    async def _run_turns(self, conversation: Conversation, tools: ToolBox) -> RolloutResult:
        for turn_number in range(1, self.context.rollout.max_turns + 1):
            turn, reply = await self._generate(conversation)
            answer = self.context.scoring.extract_answer(reply.content, self.task.answer_schema)
            if answer is not None:
                return RolloutResult("answered", answer)
            if turn.finish_reason == "length":
                raise LimitReached("length_limit")
            is_last = turn_number == self.context.rollout.max_turns
            if 0 < self.context.rollout.repetition_early_stop_times <= self._num_seen(reply):
                if is_last or not self.context.rollout.enable_repetition_compress:
                    raise LimitReached("repetition")
                await self._compress(conversation)
                continue
            if is_last:
                # No turn is left in which the model could read the results of its calls.
                break
            conversation.add(*await self._respond(reply, tools))
        raise LimitReached("turns_limit")

    async def _generate(self, conversation: Conversation) -> tuple[DispatchedSamplingTask, Reply]:
        mode = self.context.rollout.new_context
        if mode == "disabled":
            return await self.generate(conversation, advantage_override=self._advantage_override)
        reserve = min(CONTEXT_RESERVE, self.context.sampling.max_new_tokens)
        try:
            return await self.generate(
                conversation, advantage_override=self._advantage_override, min_room=reserve
            )
        except LimitReached as limit:
            if limit.outcome != "length_limit":
                raise
        await self._renew(conversation, conversation.history, mode)
        return await self.generate(conversation, advantage_override=self._advantage_override)

    async def _compress(self, conversation: Conversation) -> None:
        """Renew the context without the repetitions, and count repetitions from zero."""
        self._replies.clear()
        self._num_reminders = 0
        reason = f"repetition_{self.context.rollout.new_context}"
        await self._renew(conversation, without_repetitions(conversation.history), reason)

    async def _renew(self, conversation: Conversation, history: list[Message], reason: str) -> None:
        """Replace the context by the part of `history` that the configured mode keeps."""
        opening = self._opening()
        if self.context.rollout.new_context == "discard_all_tools":
            conversation.rewrite(without_tool_results(history, opening), reason)
            return
        work = history[len(opening) :]
        if self.context.summarizer is not None and work:
            before = "" if self._summary is None else f"{self._summary}\n\n"
            self._summary = await self.within_time(
                self.context.summarizer.summarize_history(self.task.query, before + as_text(work))
            )
        conversation.rewrite(only_the_opening(opening, self._summary), reason)

    def _advantage_override(self, turn: DispatchedSamplingTask, reply: Reply) -> float | None:
        """Count a reply; return 0 as its advantage if it is malformed or a repetition."""
        self._replies[reply.text.strip()] += 1
        malformed = any(call.format_error is not None for call in turn.tool_calls)
        return 0.0 if malformed or self._num_seen(reply) > 1 else None

    def _num_seen(self, reply: Reply) -> int:
        return self._replies[reply.text.strip()]

    async def _respond(self, reply: Reply, tools: ToolBox) -> list[Message]:
        if reply.tool_calls and tools.specs:
            self._num_reminders = 0
            return await self._call_tools(reply.tool_calls, tools)
        limit = self.context.rollout.max_reminders
        if limit is None:
            limit = REMINDERS_WITH_TOOLS if tools.specs else 0
        if self._num_reminders >= limit:
            raise LimitReached("no_answer")
        self._num_reminders += 1
        return [{"role": "user", "content": self._reminder(has_tools=bool(tools.specs))}]

    async def _call_tools(self, calls: tuple[ToolCall, ...], tools: ToolBox) -> list[Message]:
        """Run the calls one after the other: tools may keep state."""
        results: list[ToolResult] = []
        try:
            for call in calls:
                result = await self._call(call, tools)
                results.append(result)
        finally:
            # Also when a limit or an error ends the rollout, so that the results stay readable.
            if results:
                self.attach_results(results)
        return [
            {
                "role": "tool",
                "tool_call_id": result.call_id,
                "name": result.name,
                "content": content_with_images(result.content, result.images),
            }
            for result in results
        ]

    async def _call(self, call: ToolCall, tools: ToolBox) -> ToolResult:
        if self._num_calls >= self.context.rollout.max_tool_calls:
            raise LimitReached("tool_calls_limit")
        self._num_calls += 1
        if call.format_error is not None:
            return ToolResult(
                call_id=call.id,
                name=call.name,
                content=f"format error: {call.format_error}",
                is_error=True,
            )
        result = await self.result_of(call, partial(self._call_and_shorten, call, tools))
        self._num_images += len(result.images)
        return result

    async def _call_and_shorten(self, call: ToolCall, tools: ToolBox) -> ToolResult:
        """Call a tool; the summarizer, if configured, shortens a long page."""
        answered = await tools.call(call.name, call.arguments, call_id=call.id)
        result = await self._with_images(answered)
        summarizer = self.context.summarizer
        if summarizer is None or result.is_error:
            return result
        summary = await summarizer.summarize_result(call.name, call.arguments, result.content)
        return result if summary is None else result.model_copy(update={"content": summary})

    async def _with_images(self, result: ToolResult) -> ToolResult:
        """Store the images of a result, as many as the rollout may still show."""
        room = max(0, self.context.rollout.max_images - self._num_images)
        num_hidden = len(result.images) - room
        content = result.content
        if num_hidden > 0:
            content += f"\n[{num_hidden} of the images not shown: there were too many before]"
        images = await self.context.images.keep(result.images[:room])
        return result.model_copy(update={"content": content, "images": images})

    def _opening(self) -> list[Message]:
        messages: list[Message] = []
        system_texts = [text for text in (self.task.system_prompt, self._instructions) if text]
        if system_texts:
            messages.append({"role": "system", "content": "\n\n".join(system_texts)})
        messages.append(self._question)
        return messages

    async def _question_message(self) -> Message:
        if self.task.images and not self.context.renderer.shows_images_of("user"):
            raise RenderError("the task has images, which the model's chat template cannot show")
        images = await self.context.images.keep(self.task.images)
        added = added_instruction(
            self.context.rollout.answer_instruction,
            self.task.answer_schema,
            self.task.query,
            self.task.system_prompt,
            self._instructions,
        )
        query = f"{self.task.query}\n\n{added}" if added else self.task.query
        return {"role": "user", "content": question_content(query, images)}

    def _reminder(self, *, has_tools: bool) -> str:
        form = written(self.task.answer_schema)
        return f"Call a tool, or answer inside {form}." if has_tools else f"Answer inside {form}."
