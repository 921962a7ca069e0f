import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rewards import extract_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>21</answer>", "21"),
        ("<answer>1</answer> no, <answer>\n 2 \n</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>a<answer>b</answer>", "b"),
        ("<think><answer>1</answer></think>", None),
        ("<think>x</think><answer>2</answer>", "2"),
        ("<think>never closed <answer>1</answer>", None),
        ("<answer>1</answer></think>", None),
        ("<answer></answer>", ""),
        ("</answer>", None),
        ("<Answer>3</ANSWER>", "3"),
        ("<answer>1 <Answer>3</answer> 4</answer>", "3</answer> 4"),
        ("21", None),
    ],
)
def test_the_last_closed_pair_outside_thinking_is_the_answer(
    text: str, expected: str | None
) -> None:
    assert extract_answer(text, "answer") == expected


def test_any_tag_can_hold_the_answer() -> None:
    assert extract_answer("<answer>1</answer><final>2</final>", "final") == "2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{21}", "21"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} \fbox{3}", "1"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed {4}", "4"),
        (r"<think>\boxed{1}</think>", None),
        (r"\boxed", None),
        (r"so \boxed 7.", "7"),
        (r"\boxed1 and \boxed -2.5", "-2.5"),
        (r"\boxed{8}, not \boxed 7", "8"),
        (r"in \boxed form", None),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\fbox{\boxed{6}}", "6"),
        (r"\boxed{\fbox{7}}", r"\fbox{7}"),
        (r"\fbox{a\fbox{b}c}", "b"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, expected: str | None) -> None:
    assert extract_answer(text, "boxed") == expected


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["\\boxed", "{", "}", "\\", "<answer>", "</answer>", "<think>"]),
            st.text(max_size=3),
        ),
        max_size=15,
    ).map("".join),
    st.sampled_from(["boxed", "answer"]),
)
def test_answers_are_parts_of_the_text(text: str, schema: str) -> None:
    answer = extract_answer(text, schema)
    assert answer is None or answer in text.replace("<think>", "")
