"""What a program of a tool reads of the runs, answers and logins around it, and where it writes."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.private_paths import private_ports, visible_path_notes, writable_paths
from agentrl.errors import ConfigError
from agentrl.rollout.worker.resources import tools_of
from agentrl.runtime.processes.confinement import Confinement, confinement_gap

pytestmark = pytest.mark.skipif(
    confinement_gap() is not None, reason="the machine has no namespaces"
)
PRIVATE = (
    *("work/questions.jsonl", "work/.env", "work/.agentrl/ui-token"),
    *("work/output/mine/config.secrets.yaml", "work/output/other/config.secrets.yaml"),
    *("home/.ssh/id_ed25519", "home/.cache/huggingface/token"),
)
PUBLIC = ("work/server.py", "work/data/goods.json", "home/notes.txt")
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
    for name in (*PRIVATE, *PUBLIC):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return {name: tmp_path / name for name in (*PRIVATE, *PUBLIC)}


def read_by_a_tool(files: dict[str, Path], scratch: Path, *flags: str) -> set[str]:
    """Return the names of the files whose text the program sees."""
    config = parse_flags(["--run_name", "mine", "--train_file", "questions.jsonl", *flags])
    scratch.mkdir(parents=True)
    tools = tools_of(config)
    confinement = Confinement(scratch=scratch, hidden=tools.hidden_paths)
    found = printed_by(confinement, READ, *files.values())
    return {name for name, path in files.items() if found[str(path)]}


def printed_by(confinement: Confinement, program: str, *given: Path) -> Any:
    command = confinement.command([sys.executable, "-c", program, *map(str, given)])
    output = subprocess.check_output(command, env=confinement.environment(), timeout=60)
    return json.loads(output)


def written_by_a_tool(files: dict[str, Path], *flags: str) -> set[str]:
    """Return where the program creates a file, of its scratch directory and all folders around it."""
    root = files["work/server.py"].parent.parent
    scratch = root / "scratch/1"
    scratch.mkdir(parents=True)
    folders = {"scratch": scratch, "site-packages": Path(sysconfig.get_path("purelib"))}
    names = ("work", "work/data", "work/data/more", "work/output/mine", "home", "home/.ssh", "")
    folders |= {name or "root": root / name for name in names}
    folders["work/data/more"].mkdir()
    tools = tools_of(parse_flags(["--run_name", "mine", *flags]))
    confinement = Confinement(
        scratch=scratch, hidden=tools.hidden_paths, writable=tools.writable_paths
    )
    written = printed_by(confinement, WRITE, *folders.values())
    there = {name for name, folder in folders.items() if (folder / "left").exists()}
    assert {name for name, folder in folders.items() if str(folder) in written} == there
    return there


def test_a_tool_reads_no_state_of_runs_no_answers_and_no_logins(
    files: dict[str, Path], tmp_path: Path
) -> None:
    assert read_by_a_tool(files, tmp_path / "scratch/1") == set(PUBLIC)


def test_a_user_shows_a_tool_what_it_needs(files: dict[str, Path], tmp_path: Path) -> None:
    shown = ("--tool_visible_paths", "questions.jsonl,~/.ssh")
    read = read_by_a_tool(files, tmp_path / "scratch/1", *shown)
    assert read == {*PUBLIC, "work/questions.jsonl", "home/.ssh/id_ed25519"}


def test_a_visible_path_that_shows_nothing_is_noted(files: dict[str, Path], tmp_path: Path) -> None:
    shown = "questions.jsonl,data,output/mine,~/.ssh/id_ed25519"
    config = parse_flags(
        ["--run_name", "mine", "--train_file", "questions.jsonl", "--tool_visible_paths", shown]
    )
    inside = "it lies in {}, which is hidden; name that directory instead"
    assert visible_path_notes(config) == [
        "--tool_visible_paths data has no effect: it is not hidden from tools",
        "--tool_visible_paths output/mine has no effect: "
        + inside.format(tmp_path / "work/output"),
        "--tool_visible_paths ~/.ssh/id_ed25519 has no effect: "
        + inside.format(tmp_path / "home/.ssh"),
    ]
    read = read_by_a_tool(files, tmp_path / "scratch/1", "--tool_visible_paths", shown)
    assert read == {*PUBLIC, "work/questions.jsonl"}


def test_a_tool_writes_only_to_its_scratch_directory(files: dict[str, Path]) -> None:
    assert written_by_a_tool(files) == {"scratch"}


def test_a_user_opens_exactly_the_folder_that_a_tool_writes_to(files: dict[str, Path]) -> None:
    written = written_by_a_tool(files, "--tool_writable_paths", "data/more")
    assert written == {"scratch", "work/data/more"}


def test_what_is_hidden_stays_so_in_a_folder_that_a_tool_writes_to(files: dict[str, Path]) -> None:
    written = written_by_a_tool(files, "--tool_writable_paths", ".,~")
    assert written == {"scratch", "work", "work/data", "work/data/more", "home"}
    assert files["work/output/mine/config.secrets.yaml"].exists()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("absent", "it does not exist"),
        ("output", "it is hidden from tools"),
        ("output/mine", "{work}/output is hidden from tools"),
        ("questions.jsonl", "it is hidden from tools"),
        ("~/.ssh/id_ed25519", "{work}/../home/.ssh is hidden from tools"),
        ("/proc/sys", "you may not write to it"),
    ],
)
def test_a_path_that_tools_cannot_write_to_is_refused(
    files: dict[str, Path], given: str, reason: str
) -> None:
    flags = ["--run_name", "mine", "--train_file", "questions.jsonl"]
    config = parse_flags([*flags, "--tool_writable_paths", f"data,{given}"])
    reason = reason.format(work=Path.cwd()).replace("work/../", "")
    with pytest.raises(ConfigError) as caught:
        tools_of(config)
    assert str(caught.value) == f"--tool_writable_paths {given}: {reason}"


def test_a_login_that_is_shown_can_be_opened_too(files: dict[str, Path]) -> None:
    flags = ["--tool_visible_paths", "~/.ssh", "--tool_writable_paths", "~/.ssh"]
    assert writable_paths(parse_flags(flags)) == (files["home/.ssh/id_ed25519"].parent,)


def test_the_working_directory_is_never_hidden(files: dict[str, Path], tmp_path: Path) -> None:
    read = read_by_a_tool(files, tmp_path / "scratch/1", "--output_dir", ".")
    assert set(PUBLIC) <= read


def test_the_ports_of_the_run_are_those_of_its_database_and_its_servers() -> None:
    flags = [
        *("--db_connection_string", "mongodb://me:p%40ss@db1:27018,db2,[::1]:27020/demo?w=1"),
        *("--inference_urls", "http://gpu1:30000,https://models.example.com,http://gpu2"),
    ]
    assert private_ports(parse_flags(flags)) == (27017, 27018, 27020, 30000)
    shown = [*flags, "--tool_visible_ports", "30000,27018"]
    assert private_ports(parse_flags(shown)) == (27017, 27020)
    assert private_ports(parse_flags([])) == ()
