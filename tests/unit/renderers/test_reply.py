import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.renderers.reply import parse_reply, split_reasoning
from agentrl.renderers.tool_calls import parse_hermes


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


def test_calls_inside_thinking_are_no_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    reply = parse_reply(f"<think>{call}</think>x{call}", parse_hermes, starts_inside=False, turn=3)
    assert [(c.id, c.name) for c in reply.tool_calls] == [("call_3_0", "f")]
    assert (reply.content, reply.reasoning) == ("x", call)
    assert reply.message == {"role": "assistant", "content": reply.text}


@given(
    st.lists(st.one_of(st.sampled_from(["<think>", "</think>"]), st.text(max_size=3)), max_size=12),
    st.booleans(),
)
def test_no_character_is_lost_or_said_twice(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    reasoning, visible = split_reasoning(text, starts_inside=inside)
    bare = text.replace("</think>", "").replace("<think>", "")
    assert len(reasoning + visible) <= len(text)
    assert len((reasoning + visible).replace("</think>", "").replace("<think>", "")) <= len(bare)
    assert "</think>" not in visible
