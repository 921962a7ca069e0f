import errno
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.doc_blocks import DOCS
from support.processor_time import children_seconds

from agentrl.cli.main import commands, main
from agentrl.config.flags import FLAGS, USUAL, canonical_name

_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documented_flags() -> Iterator[tuple[str, str, str]]:
    """Yield page, command and flag of every command line that the README and the docs show."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in _FENCED.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(rf"\bagentrl ({'|'.join(commands())})\b(.*)", line)
                if found is None:
                    continue
                # A quoted program may go on in the next lines.
                text = found[2].partition('"')[0] if found[2].count('"') % 2 else found[2]
                for word in shlex.split(text, comments=True):
                    if word.startswith("--"):
                        yield page.name, found[1], word


def test_tracebacks_of_the_mcp_sdk_stay_off_the_console() -> None:
    code = (
        "import logging\nfrom agentrl.cli.main import main\nmain(['version'])\n"
        "logging.getLogger('mcp.client.streamable_http').error('Error in post_writer')\n"
        "logging.getLogger('agentrl').warning('said')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "said\n"


def test_a_users_file_does_not_stand_for_a_module_of_pythons(tmp_path: Path) -> None:
    for name in ("random", "queue", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "run", "--max_steps", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr.startswith("agentrl run: --max_steps: ")


def test_nobody_else_may_write_into_what_a_command_makes(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "agentrl", "init", "mine/project"], cwd=tmp_path, umask=0, check=True
    )
    made = [tmp_path / "mine", *(tmp_path / "mine").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o775, 0o664}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("inspect runs >/dev/full", 1, "the output: No space left on device; free"),
        ("inspect runs >&-", 0, ""),
        ("run --max_steps 0 2>&-", 2, ""),
        ("run --dry_run", 1, "the current folder was deleted; change to another"),
    ],
)
def test_what_the_shell_leaves_to_write_to_and_to_work_in(
    words: str, status: int, said: str, tmp_path: Path
) -> None:
    leaves = 'rmdir "$PWD"; ' if "--dry_run" in words else ""
    done = subprocess.run(
        ["bash", "-c", f"{leaves}exec {sys.executable} -m agentrl {words}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.EACCES,
            "lock: Permission denied; run the command as its owner, or in a folder of y",
        ),
        (errno.EROFS, "lock: Read-only file system; change to another folder\n"),
        (errno.ENAMETOOLONG, "lock: File name too long; give a shorter path\n"),
    ],
)
def test_somebody_elses_files_are_named_in_one_line(
    number: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def serving(data_dir: Path) -> None:
        raise OSError(number, os.strerror(number), f"{data_dir}/lock")

    for place in ("private_mongod", "mongod_folder"):
        monkeypatch.setattr(f"agentrl.store.{place}.serving", serving)
    (tmp_path / ".agentrl/mongo/demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "progress", "--run_name", "demo"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_an_output_that_lacks_a_character_gets_its_escape(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "init", str(tmp_path / "tür")],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "t\\u00fcr has README.md" in done.stdout


def test_help_takes_less_than_a_second_and_names_every_command() -> None:
    before = children_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "--help"], capture_output=True, text=True, check=True
    )
    assert children_seconds() - before < 1.0
    for command in commands():
        assert command in done.stdout


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    # Neither a new project nor the tools' environment belongs to a run.
    flag = {"env": "--mcp_servers", "init": "FOLDER"}.get(command, "--run_name")
    assert flag in capsys.readouterr().out


def test_the_docs_show_only_flags_that_the_command_explains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = set(documented_flags())
    assert len(shown) > 40
    texts = {}
    for command in {one for _, one, _ in shown}:
        assert main([command, "--help-all"]) == 0
        texts[command] = capsys.readouterr().out
    unknown = [
        (page, command, flag)
        for page, command, flag in sorted(shown)
        if not re.search(rf"--{canonical_name(flag)}\b", texts[command])
    ]
    assert not unknown


def test_help_shows_the_usual_flags_and_tells_how_to_see_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["run", "--help-all"]) == 0
    complete = capsys.readouterr().out
    flags = {name: re.compile(rf"^  --{name}\b", re.MULTILINE) for name in FLAGS}
    assert [name for name, line in flags.items() if not line.search(complete)] == []
    assert {name for name, line in flags.items() if line.search(short)} == set(USUAL)
    assert f"--help-all` explains {len(FLAGS) - len(USUAL)} further flags" in short
    for text in (short, complete):
        assert "--loss_calculator GRPO|MINIRL|GSPO|CISPO|REINFORCE" in text


@pytest.mark.parametrize("command", ["", *commands()])
def test_help_fits_eighty_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--help-all") if command else ("--help",):
        assert main([*command.split(), flag]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80] == []


def test_twenty_flags_are_usual() -> None:
    assert len(USUAL) == 20


@pytest.mark.parametrize("words", ["help", "run --help-all", "inspect --help"])
def test_a_reader_that_leaves_early_is_no_error(words: str) -> None:
    command = f"{sys.executable} -m agentrl {words} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_reader_that_leaves_in_the_middle_of_a_long_line_is_no_error() -> None:
    program = (
        "from agentrl.cli import main as cli;"
        "cli.agentrl.invoke = lambda context: print('x' * 10_000_000);"
        "raise SystemExit(cli.main(['inspect', 'runs']))"
    )
    command = f'{sys.executable} -c "{program}" | head -c 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("x", "")


def test_an_unknown_command_is_named_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rnu"]) == 2
    assert "unknown command 'rnu'; one of init, run, sample" in capsys.readouterr().err


@pytest.mark.parametrize("command", list(commands()))
def test_an_unknown_flag_ends_every_command_with_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--max_step", "3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean --max_steps?" in error
    assert error.count("\n") == 1
