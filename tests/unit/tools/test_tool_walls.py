"""What a program of a tool or an agent reads of the files around it, and where it writes."""

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.errors import ConfigError
from agentrl.rollout.worker.resources import tools_of
from agentrl.runtime.processes.wall import Wall, named_paths, wall_gap
from agentrl.tools.tool_walls import tool_wall

pytestmark = pytest.mark.skipif(wall_gap() is not None, reason="the machine has no namespaces")
FILES = (
    *("work/questions.jsonl", "work/.env", "work/.agentrl/ui-token", "work/.git/HEAD"),
    *("work/output/mine/config.secrets.yaml", "work/output/other/config.secrets.yaml"),
    *("home/.ssh/id_ed25519", "home/.cache/huggingface/token", "home/notes.txt"),
    *("work/server.py", "work/helpers.py", "work/data/goods.json", "work/servers.json"),
)
READ = """
import json, pathlib, sys
def read(path):
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""
print(json.dumps({path: read(path) for path in sys.argv[1:]}))
"""
WRITE = """
import json, pathlib, sys
written = []
for path in sys.argv[1:]:
    try:
        (pathlib.Path(path) / "left").touch()
        written.append(path)
    except OSError as error:
        print(error, file=sys.stderr)
print(json.dumps(written))
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return {name: tmp_path / name for name in FILES}


def wall_of(words: str, *flags: str) -> Wall:
    config = parse_flags(["--run_name", "mine", "--train_file", "questions.jsonl", *flags])
    return tool_wall(config, named_paths(words.split()), named_by="the program")


def printed_by(wall: Wall, scratch: Path, program: str, *given: Path | str) -> Any:
    scratch.mkdir(exist_ok=True)
    command = replace(wall, scratch=scratch).command(
        [sys.executable, "-c", program, *map(str, given)]
    )
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def read_by(wall: Wall, files: dict[str, Path], scratch: Path) -> set[str]:
    """Return the names of the files whose text the program sees."""
    found = printed_by(wall, scratch, READ, *files.values())
    return {name for name, path in files.items() if found[str(path)]}


def test_a_program_sees_what_its_command_line_names(files: dict[str, Path], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    assert read_by(wall_of("python server.py"), files, scratch) == {"work/server.py"}
    named = wall_of("python -m helpers --goods=./data --verbose data output")
    assert read_by(named, files, scratch) == {"work/helpers.py", "work/data/goods.json"}


def test_a_user_opens_what_a_program_needs(files: dict[str, Path], tmp_path: Path) -> None:
    wall = wall_of("python server.py", "--tool_visible_paths", "helpers.py,~/.ssh,questions.jsonl")
    opened = {"work/helpers.py", "home/.ssh/id_ed25519", "work/questions.jsonl"}
    assert read_by(wall, files, tmp_path / "scratch") == {"work/server.py", *opened}


def test_a_program_writes_only_to_folders_of_its_own(
    files: dict[str, Path], tmp_path: Path
) -> None:
    packages = sysconfig.get_path("purelib")
    data, home, work = (str(tmp_path / name) for name in ("work/data", "home", "work"))
    scratch = tmp_path / "scratch"
    everywhere = (data, packages, home, work, str(scratch), "/tmp", "/run", "/usr", "/etc", "/")
    written = printed_by(wall_of("python ./data"), scratch, WRITE, *everywhere)
    assert not {data, packages, home, "/usr", "/etc", "/"} & set(written)
    assert {work, str(scratch), "/tmp", "/run"} <= set(written)
    # Its working directory and /tmp are private ones: nothing of them is left behind.
    assert [*tmp_path.rglob("left")] == [scratch / "left"]
    wall = wall_of("python ./data", "--tool_writable_paths", "data")
    assert data in printed_by(wall, scratch, WRITE, *everywhere)
    assert (tmp_path / "work/data/left").exists()


@pytest.mark.parametrize(
    ("words", "flags", "problem"),
    [
        ("git .", "", r"the program: .*/work holds the state of runs"),
        ("git ./output", "", r"output is the output of runs"),
        ("git ./output/mine", "", r"mine is in the output of runs"),
        ("python ~/", "--tool_visible_paths ~", r"--tool_visible_paths: ~ shows tools everything"),
        ("python /", "", r"the program: / shows tools everything"),
        ("python /tmp", "", r"/tmp shows tools everything"),
        ("python ./questions.jsonl", "", r"questions\.jsonl is the run's answers"),
        (
            "python",
            "--tool_visible_paths nowhere",
            r"--tool_visible_paths nowhere: it does not exist",
        ),
        (
            "python",
            "--tool_writable_paths output",
            r"--tool_writable_paths: output is the output of runs",
        ),
    ],
)
@pytest.mark.usefixtures("files")
def test_what_shows_too_much_is_refused_by_name(words: str, flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        wall_of(words, *flags.split())


def test_a_link_that_a_program_planted_in_its_folder_opens_nothing(
    files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "work/data/out").symlink_to(tmp_path / "home/.ssh")
    flags = ("--tool_writable_paths", "data", "--tool_visible_paths", "data/out")
    assert read_by(wall_of("python ./data", *flags), files, tmp_path / "scratch") == {
        "work/data/goods.json"
    }


def test_a_command_that_is_a_link_runs_as_that_link(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "work/tool").symlink_to(tmp_path / "work/server.py")
    wall = wall_of("python ./tool")
    look = (
        "import json, os, sys; print(json.dumps([os.path.realpath(one) for one in sys.argv[1:]]))"
    )
    given = tmp_path / "work/tool"
    assert printed_by(wall, tmp_path / "scratch", look, given) == [str(files["work/server.py"])]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.usefixtures("files")
def test_a_path_that_the_user_may_not_write_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="you may not write to it"):
        wall_of("python", "--tool_writable_paths", "/usr/lib")


def test_what_a_server_names_is_checked_before_the_start(files: dict[str, Path]) -> None:
    server = {"command": "python", "args": ["server.py"], "env": {"DATA": "./questions.jsonl"}}
    flags = ["--train_file", "questions.jsonl", "--mcp_servers"]
    config = parse_flags([*flags, json.dumps({"mcpServers": {"shop": server}})])
    with pytest.raises(ConfigError, match=r"mcpServers\.shop: .* is the run's answers"):
        tools_of(config)
