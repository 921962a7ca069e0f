"""The file of an edit may hold anything."""

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.plugins.inspector.fork_commands import _read
from agentrl.plugins.inspector.fork_run import edited_messages


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 200_000, "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"null", "an edit must be a JSON object"),
        (b'{"messages": [7]}', "message 0 is not a JSON object"),
        (b'{"messages": [{"role": "' + b"x" * 10**6 + b'"}]}', "message 0: unknown role"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "content must be text"),
    ],
)
def test_an_edit_that_is_none_is_refused_in_one_line(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "edit.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as refused:
        edited_messages(_read(path))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
