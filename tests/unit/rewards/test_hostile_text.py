"""Whatever a model writes is read in time that grows with its length, not with its square.

Every reader of sampled text is held against texts that repeat its marks, leave them open, or put
endless filling behind them.
"""

import time
from collections.abc import Callable

import pytest
from harness.attacks.texts import BEGUN, FILLING, READERS, THINKING, Reader, hostile_texts, repeated
from hypothesis import strategies as st
from support.fuzzing import TryCases

SIZES = (4_000, 32_000)
"""The shorter one first: a reader whose time grows with the cube would take hours for the longer."""
MAX_SECONDS = 0.25
"""Processor time for any of them: ten times what the slowest takes. A text of this length that takes
time with its square takes 10**9 steps."""


def seconds(read: Reader, text: str) -> float:
    begin = time.thread_time()
    read(text)
    return time.thread_time() - begin


def check_time(read: Reader, make: Callable[[int], str], what: str) -> None:
    for size in SIZES:
        spent = seconds(read, make(size))
        assert spent <= MAX_SECONDS, f"{what}: {size} characters took {spent:.2f} s"


@pytest.mark.parametrize("reader", READERS)
def test_time_grows_with_the_length_of_the_text(reader: str) -> None:
    read, marks = READERS[reader]
    for what, make in hostile_texts(marks):
        check_time(read, make, what)


@pytest.mark.fuzz(10)
@pytest.mark.parametrize("reader", READERS | BEGUN)
def test_time_grows_with_the_length_of_random_repetitions(reader: str, try_cases: TryCases) -> None:
    read, marks = (READERS | BEGUN)[reader]
    fragments = st.sampled_from([*THINKING, *marks, *FILLING, *"}])>,:;=", "<answer>", "x" * 30])

    def check(begin: str, unit: list[str], end: str) -> None:
        text = "".join(unit)
        check_time(read, lambda size: begin + repeated(text, size) + end, repr(text))

    units = st.lists(fragments, min_size=1, max_size=5)
    try_cases(check, begin=st.text(max_size=3), unit=units, end=fragments)


@pytest.mark.fuzz(10)
@pytest.mark.parametrize("reader", READERS | BEGUN)
def test_no_text_makes_a_reader_raise(reader: str, try_cases: TryCases) -> None:
    read, marks = (READERS | BEGUN)[reader]
    pieces = st.sampled_from([*THINKING, *marks, *FILLING, *"}])>,:;='\"", "<answer>"])
    texts = st.lists(pieces | st.text(max_size=4), max_size=20).map("".join)
    try_cases(lambda text: read(text), text=texts)
