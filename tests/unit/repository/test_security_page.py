"""Pages that name tests as their evidence name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["security", "origin-checklist"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []
