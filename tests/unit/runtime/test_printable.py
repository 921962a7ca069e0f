import json

import pytest
from hypothesis import strategies as st
from support.fuzzing import TryCases

from agentrl.runtime.printable import counted, one_line, printable, printable_json

HOSTILE = [
    ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
    ("\x1b[2J", "\\x1b[2J"),
    ("\x9b31m", "\\x9b31m"),  # the same in 8 bits
    ("a\rb", "a\\x0db"),
    ("a\u202eb", "a\\u202eb"),  # what follows is shown from right to left
    ("a\u2028b", "a\\u2028b"),
    ("\ud800", "\\ud800"),  # cannot be encoded
    ("\U000e0041", "\\U000e0041"),  # invisible
]


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_what_steers_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    text = "größer 山田\u3000太郎 नमस\u200dते 👩\u200d👧 tab\tline\n"
    assert printable(text) == text


def test_a_line_stays_a_line() -> None:
    assert one_line("a\nb\tc") == "a\\nb c"


def test_a_megabyte_is_cut_with_a_note() -> None:
    assert printable("x" * 2**20, 5) == "xxxxx… (1048576 characters)"


@pytest.mark.fuzz(100)
def test_json_keeps_its_value(try_cases: TryCases) -> None:
    def check(text: str) -> None:
        written = printable_json(json.dumps({"a": text}, ensure_ascii=False))
        assert json.loads(written) == {"a": text}
        assert printable(written) == written
        written.encode()

    try_cases(check, text=st.text())


def test_a_number_has_its_noun() -> None:
    assert [counted(n, "record") for n in (0, 1, 12_000)] == [
        "0 records",
        "1 record",
        "12,000 records",
    ]
