"""What a set of examples teaches: counts for the first line of a run, and what is suspicious."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    shows_tools: bool = False


def lesson_of(turns: Sequence[DispatchedSamplingTask]) -> Lesson:
    """Return what the turns of a conversation teach."""
    learned = [turn for turn in turns if turn.trainable]
    calls = [turn.tool_calls for turn in learned]
    return Lesson(
        num_replies=len(learned),
        num_calls=sum(map(len, calls)),
        num_empty=sum(len(turn.output_ids) < 2 for turn in learned),
        num_broken=sum(any(call.format_error for call in one) for one in calls),
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
    with_tools = [lesson for lesson in lessons if lesson.shows_tools]
    if with_tools and not any(lesson.num_calls for lesson in with_tools):
        yield (
            f"{len(with_tools)} conversations describe tools and none calls one: the model learns "
            "not to call them; write calls as `tool_calls`, or remove `tools`"
        )
