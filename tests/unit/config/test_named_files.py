import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.named_files import read_text_file
from agentrl.errors import ConfigError
from agentrl.rewards import AgentConfig
from agentrl.tools import load_mcp_servers


def read_config(path: Path) -> object:
    return parse_flags(["--config", str(path)])


def read_template(path: Path) -> object:
    return parse_flags(["--chat_template", str(path)])


READERS = [read_config, read_template, AgentConfig.load, load_mcp_servers]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_device_or_a_pipe_is_refused_at_once(
    tmp_path: Path, read: Callable[[Path], object], kind: str
) -> None:
    path = tmp_path / kind  # an absolute kind remains itself
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"devices and pipes are not supported; give a file"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_is_far_too_long_is_refused(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ConfigError, match=r"longer than 16 Mi characters; give a shorter file"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_a_file_in_another_encoding_is_one_line(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xfc")
    with pytest.raises(ConfigError, match=r"^[^\n]*not UTF-8 text; save it as UTF-8[^\n]*$"):
        read(tmp_path / "latin")


@pytest.mark.parametrize("read", READERS)
def test_a_missing_file_is_named_with_the_folder_that_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"No such file or directory in {tmp_path}"):
        read(Path("nowhere"))


def test_a_byte_order_mark_and_windows_line_ends_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_bytes("\ufeffa: 1\r\nb: ü\r\n".encode())
    assert read_text_file(tmp_path / "a.yml") == "a: 1\nb: ü\n"
