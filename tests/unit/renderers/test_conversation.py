"""Whole conversations, in the templates of well-known families, against an engine's log."""

import numpy as np
import pytest
from support.chat_families import FAMILIES, REAL_FAMILIES
from support.chat_play import Case, Played, answered_by_tools, cases, failure_of, model, play
from support.fuzzing import TryCases

from agentrl.renderers.conversation import Conversation, Prompt
from agentrl.schema import rebuild_prompts


def check_conversation(name: str, case: Case) -> None:
    one = model(name)
    played = play(one, case)
    for rebuilt, seen in zip(rebuild_prompts(played.turns), played.engine_saw, strict=True):
        np.testing.assert_array_equal(rebuilt, seen)

    control = sorted(one.renderer.control_token_ids)
    harmless = play(one, case, harmless=True)
    for seen, plain in zip(played.engine_saw, harmless.engine_saw, strict=True):
        assert np.isin(seen, control).sum() == np.isin(plain, control).sum()

    for index, (seen, text) in enumerate(zip(played.engine_saw, played.texts, strict=True)):
        before = case.steps[:index]
        if any(step.kind == "noise" for step in before):
            break
        if name == "mistral" and any(step.kind == "call" for step in before):
            break  # its template writes calls with other spaces than its models
        assert one.renderer.decode(seen) == text

    for index in range(1, len(played.turns)):
        if any(step.kind == "noise" for step in case.steps[:index]):
            break
        assert played.turns[index].branch_reason == expected_reason(name, case, played, index)


def expected_reason(name: str, case: Case, played: Played, index: int) -> str | None:
    """Say where a template rewrites history: exactly there the prompt may not be appended."""
    asked_again = played.followed_by_user[index - 1]
    if name == "mistral":
        # The system prompt stands in the last message, the tools before the last question.
        parent_ends_with_question = index == 1 or played.followed_by_user[index - 2]
        moved = case.system is not None and parent_ends_with_question
        return "drift" if moved or (asked_again and case.with_tools) else None
    if not asked_again:
        return None
    if name == "qwen3_stripped":
        first = index - 1
        while first > 0 and not played.followed_by_user[first - 1]:
            first -= 1
        return "drift" if any(step.thinking for step in case.steps[first:index]) else None
    return None


@pytest.mark.fuzz(50)
@pytest.mark.parametrize("name", FAMILIES)
def test_rebuilt_prompts_are_the_engines_and_outside_text_makes_no_control_token(
    name: str, try_cases: TryCases
) -> None:
    try_cases(lambda case: check_conversation(name, case), case=cases(name))


def check_real_conversation(name: str, case: Case) -> None:
    """A released template: ids are kept, nothing from outside is control, results are appended."""
    one = model(name)
    played = play(one, case)
    assert failure_of(one, case, played) is None
    for turn in answered_by_tools(case, played):
        # Gemma 4's template moves what was said beside a call, and again with every further call.
        asked = [n for n in range(turn.index) if played.followed_by_user[n]]
        since = case.steps[asked[-1] + 1 if asked else 0 : turn.index]
        assert turn.branch_reason is None or any(
            one.family.rewrites_call(step.words) for step in since
        )


@pytest.mark.fuzz(20)
@pytest.mark.parametrize("name", [name for name, one in REAL_FAMILIES.items() if one.is_there])
def test_released_templates_are_continued_exactly(name: str, try_cases: TryCases) -> None:
    try_cases(lambda case: check_real_conversation(name, case), case=cases(name))


@pytest.mark.parametrize(
    ("before", "shared_len", "added"),
    [(("a", "b"), 3, ("b",)), (("c", "b"), 1, ("a", "b"))],
)
def test_an_image_is_shared_with_the_tokens_before_which_nothing_differs(
    before: tuple[str, ...], shared_len: int, added: tuple[str, ...]
) -> None:
    prompt = Prompt(np.array([1, 9, 2, 9, 3], np.int32), 0, 3, None)
    shown = prompt.showing(("a", "b"), before, 9)
    assert (shown.shared_len, shown.added_images) == (shared_len, added)


def test_a_rewritten_history_is_the_reason_of_one_turn() -> None:
    conversation = Conversation([{"role": "user", "content": "long"}])
    conversation.rewrite([{"role": "user", "content": "short"}], "summary")
    assert conversation.branch_reason == "summary"
    conversation.replied(0, np.array([1, 2], np.int32), {"role": "assistant", "content": "x"})
    assert [conversation.branch_reason, conversation.pending] == [None, []]
