"""The interpreter of a console script, in every form that installers write."""

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.inference.supervisor import sglang_backend
from agentrl.inference.supervisor.script_interpreter import script_interpreter

PRINT = "import sys; print(sys.prefix)"
# Importing pip would switch off setuptools' own distutils for every later test of this process.
PIP = str(metadata.distribution("pip").locate_file(""))


def written(folder: Path, text: str) -> Path:
    script = folder / "sglang"
    script.write_text(text)
    script.chmod(0o755)
    return script


def environment(folder: Path) -> Path:
    """Return an interpreter of its own in a folder."""
    venv.create(folder, symlinks=True)
    return folder / "bin/python"


def starts(words: list[str]) -> str:
    result = subprocess.run([*words, "-c", PRINT], stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("name", "first_line"),
    [("plain", "#!/"), ("with spaces", "#!/bin/sh"), ("long" * 40, "#!/bin/sh"), ("it's", "#!/")],
    ids=["plain", "spaces", "long", "quote"],
)
def test_scripts_of_pip_name_their_interpreter(name: str, first_line: str, tmp_path: Path) -> None:
    python = environment(tmp_path / name)
    code = (
        f"import sys; sys.path.append({PIP!r}); from pip._vendor.distlib.scripts import ScriptMaker;"
        f"maker = ScriptMaker(None, {str(python.parent)!r}); maker.variants = {{''}};"
        "maker.make('sglang = json.tool:main')"
    )
    subprocess.run([python, "-c", code], check=True)
    script = python.parent / "sglang"
    assert script.read_text().startswith(first_line)
    words = script_interpreter(script)
    assert starts(words) == starts([str(python)])


@pytest.mark.parametrize(
    ("first_line", "words"),
    [
        ("#!/usr/bin/env python3", ["python3"]),
        ("#!/usr/bin/env -S python3 -I", ["python3", "-I"]),
        ("#! /usr/bin/env python3", ["python3"]),
        (f"#!{sys.executable} -s", [sys.executable, "-s"]),
    ],
)
def test_env_and_options_are_words_of_the_command(
    first_line: str, words: list[str], tmp_path: Path
) -> None:
    found = script_interpreter(written(tmp_path, f"{first_line}\nimport sglang\n"))
    assert found == words
    assert starts(found)


def test_a_movable_script_of_uv_names_the_interpreter_beside_it(tmp_path: Path) -> None:
    python = environment(tmp_path / "moved here")
    script = written(
        python.parent,
        '#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/\'python\' "$0" "$@"\n'
        "' '''\nimport sys\n",
    )
    assert script_interpreter(script) == [str(python)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sglang\n", "no first line"),
        ("#!/bin/sh\nPYTHONPATH=/x exec python3 -m sglang\n", "another form"),
        ("#!/usr/bin/env A=1 python3\n", "sets variables"),
        ("#!\n", "its first line is"),
        ("#!/nowhere/bin/python\n", "not an executable file"),
    ],
)
def test_what_names_no_interpreter_is_refused_with_what_to_do(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, text)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError, match=reason) as raised:
        sglang_backend.sglang_python()
    assert str(script) in str(raised.value)


def test_a_wrapper_that_sets_the_path_of_modules_is_an_interpreter(tmp_path: Path) -> None:
    wrapper = tmp_path / "with-sglang"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH=/packages exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    script = written(tmp_path, f"#!{wrapper}\nimport sglang\n")
    assert script_interpreter(script) == [str(wrapper)]
