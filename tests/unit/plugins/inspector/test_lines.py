"""Ids and addresses can be copied from any page, at 80 columns and in pipes."""

import io

from rich.console import Console, Group, RenderableType

from agentrl.plugins.inspector.lines import PIPE_WIDTH, Rows, heading, labeled

RECORD = "train/0/a-question-with-quite-a-long-name-0123456789/3"
OWNER = "build-host-7.example.org:123456:4026531836-0123abcd"
URI = "mongodb://agentrl:***@127.0.0.1:27417/demo?replicaSet=rs0&w=majority&authSource=admin"


def page() -> Rows:
    rows = Rows("record", ">score", "+held by", "+at")
    rows.add(RECORD, "0.5", OWNER, URI)
    rows.add("train/0/q1/0", "-", "", "[red]\x1b[2J\nhere")
    return rows


def drawn(page: RenderableType, width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(page, crop=False)
    return text.getvalue()


def test_in_a_pipe_a_row_is_one_line() -> None:
    head, first, second = drawn(page(), PIPE_WIDTH).splitlines()
    assert head.split() == ["record", "score", "held", "by", "at"]
    assert first.split() == [RECORD, "0.5", OWNER, URI]
    assert second.split() == ["train/0/q1/0", "-", "[red]\\x1b[2J\\nhere"]
    assert head.index("held by") == first.index(OWNER)


def test_at_80_columns_long_columns_stand_below_their_row() -> None:
    assert drawn(page(), 80).splitlines() == [
        f"{'record':{len(RECORD)}}  score",
        f"{RECORD}    0.5",
        f"  held by {OWNER}",
        f"  at {URI}",
        f"{'train/0/q1/0':{len(RECORD)}}      -",
        "  at [red]\\x1b[2J\\nhere",
    ]


def test_wide_characters_keep_the_columns_aligned() -> None:
    rows = Rows("name", ">n")
    rows.add("日本", "1")
    rows.add("abcd", "22")
    assert drawn(rows, 80) == "name   n\n日本   1\nabcd  22\n"


def test_a_long_title_is_whole_and_prose_is_wrapped_between_words() -> None:
    assert drawn(Group(heading(URI)), 20) == f"{URI}\n"
    lines = drawn(labeled("answer", "four euro and fifty cents \x07", limit=None), 30).splitlines()
    assert [line.strip() for line in lines] == ["answer  four euro and", "fifty cents \\x07"]
