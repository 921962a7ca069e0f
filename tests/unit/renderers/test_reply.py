import pytest
from hypothesis import strategies as st
from support.fuzzing import TryCases

from agentrl.renderers.reply import parse_reply
from agentrl.renderers.thinking import split_reasoning
from agentrl.renderers.tool_calls.call_format import ToolCallFormat


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("plain", False, ("", "plain")),
        ("<think>a</think>b", False, ("a", "b")),
        ("<think>a</think>b<think>c</think>d", False, ("ac", "bd")),
        ("<think>never closed <answer>1</answer>", False, ("never closed <answer>1</answer>", "")),
        ("opened by the prompt</think>b", False, ("opened by the prompt", "b")),
        ("opened by the prompt</think>b", True, ("opened by the prompt", "b")),
        ("all of it", True, ("all of it", "")),
        ("a<think>b</think>c</think>d", False, ("bac", "d")),
    ],
)
def test_thinking_is_told_from_what_is_said(
    text: str, inside: bool, expected: tuple[str, str]
) -> None:
    assert split_reasoning(text, starts_inside=inside) == expected


PIECES = st.lists(
    st.one_of(st.sampled_from(["<think>", "</think>"]), st.text(max_size=3)), max_size=12
)


@pytest.mark.fuzz(100)
def test_no_character_is_lost_or_said_twice(try_cases: TryCases) -> None:
    def check(text: str, *, inside: bool) -> None:
        reasoning, visible = split_reasoning(text, starts_inside=inside)
        bare = text.replace("</think>", "").replace("<think>", "")
        assert len(reasoning + visible) <= len(text)
        said = (reasoning + visible).replace("</think>", "").replace("<think>", "")
        assert len(said) <= len(bare)
        assert "</think>" not in visible

    try_cases(check, text=PIECES.map("".join), inside=st.booleans())


@pytest.mark.fuzz(100)
def test_replies_and_answers_tell_thinking_in_the_same_way(try_cases: TryCases) -> None:
    def check(text: str, *, inside: bool) -> None:
        reply = parse_reply(text, ToolCallFormat(), starts_inside=inside)
        assert (reply.reasoning, reply.content) == split_reasoning(text, starts_inside=inside)

    try_cases(check, text=PIECES.map("".join), inside=st.booleans())
