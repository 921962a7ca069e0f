"""What a set of examples teaches: counts for the first line of a run, and what is suspicious."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.renderers.template_traits import TemplateTraits
from agentrl.schema import DispatchedSamplingTask


@dataclass(frozen=True)
class Lesson:
    """The replies of one conversation that are learned."""

    num_replies: int = 0
    num_calls: int = 0
    num_empty: int = 0
    """Replies without a token apart from the one that ends them."""
    num_broken: int = 0
    """Replies with a call that the parser refuses."""
    num_thoughtless: int = 0
    """Replies that begin with an empty thought."""
    num_reopened: int = 0
    """Replies that think although their prompt has ended the thinking."""
    shows_tools: bool = False


def lesson_of(
    turns: Sequence[DispatchedSamplingTask], traits: TemplateTraits | None = None
) -> Lesson:
    """Return what the turns of a conversation teach.

    Args:
        turns: the conversation.
        traits: of the template that wrote it; None for tokens that a model sampled.
    """
    learned = [turn for turn in turns if turn.trainable]
    thoughtless = reopened = 0
    if traits is not None:
        marks = traits.marks
        texts = [turn.output_text.lstrip() for turn in learned]
        thoughtless = sum(
            text.removeprefix(marks.open).lstrip().startswith(marks.close) for text in texts
        )
        if marks.close in traits.prompt_text:
            reopened = sum(text.startswith(marks.open) for text in texts)
    calls = [turn.tool_calls for turn in learned]
    return Lesson(
        num_replies=len(learned),
        num_calls=sum(map(len, calls)),
        num_empty=sum(len(turn.output_ids) < 2 for turn in learned),
        num_broken=sum(any(call.format_error for call in one) for one in calls),
        num_thoughtless=thoughtless,
        num_reopened=reopened,
        shows_tools=any(turn.tools for turn in turns),
    )


def summed_up(lessons: Sequence[Lesson], num_tokens: int) -> str:
    """Return the line that says what is learned."""
    replies = sum(lesson.num_replies for lesson in lessons)
    calls = sum(lesson.num_calls for lesson in lessons)
    return (
        f"{len(lessons)} conversations with {replies} replies to learn: {calls} tool calls, "
        f"{num_tokens:,} tokens ({num_tokens / max(replies, 1):.0f} a reply)"
    )


def suspicions(lessons: Sequence[Lesson]) -> Iterator[str]:
    """Yield what is probably not meant."""
    replies = sum(lesson.num_replies for lesson in lessons)
    if empty := sum(lesson.num_empty for lesson in lessons):
        yield (
            f"{empty} of {replies} replies are empty: the model learns to end its turn without a "
            "word; remove them, or give them weight 0"
        )
    if broken := sum(lesson.num_broken for lesson in lessons):
        yield (
            f"{broken} of {replies} replies hold a tool call that cannot be parsed, which the model "
            "learns to write; correct them, or give them weight 0"
        )
    if thoughtless := sum(lesson.num_thoughtless for lesson in lessons):
        yield (
            f"{thoughtless} of {replies} replies begin with an empty thought, as the chat template asks "
            "for thinking and they have none: the model learns not to think; write `reasoning_content`, "
            "or turn thinking off here and in the run (--chat_template_kwargs)"
        )
    if reopened := sum(lesson.num_reopened for lesson in lessons):
        yield (
            f"{reopened} of {replies} replies think although their prompt has ended the thinking: turn "
            "it on (--chat_template_kwargs '{\"enable_thinking\": true}'), or remove the thinking"
        )
    with_tools = [lesson for lesson in lessons if lesson.shows_tools]
    if with_tools and not any(lesson.num_calls for lesson in with_tools):
        yield (
            f"{len(with_tools)} conversations describe tools and none calls one: the model learns "
            "not to call them; write calls as `tool_calls`, or remove `tools`"
        )
