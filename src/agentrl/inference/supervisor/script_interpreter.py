"""The command that runs programs in the environment of an installed console script.

Installers write the interpreter into a script in several forms: as a plain first line, behind
`/usr/bin/env`, or, for a path with spaces or of more than 127 characters, in a line that `/bin/sh`
executes. The interpreter may be a wrapper of any name that sets variables and executes Python.
"""

import re
import shlex
import shutil
from pathlib import Path

from agentrl.errors import ConfigError

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_ENV_OPTIONS_WITH_VALUE = frozenset({"-u", "--unset", "-C", "--chdir"})
_TRAMPOLINE = re.compile(r"^'''exec' (?P<words>.+?) \"\$0\" \"\$@\"\s*$", re.MULTILINE)
"""pip, distlib and uv: shell code that Python reads as a string. uv writes
`"$(dirname -- "$(realpath -- "$0")")"/'python'` for an environment that can be moved."""
_RELATIVE = re.compile(r"\"?\$\(dirname [^/]*\"\$0\"[^/]*\)\"?/")


def script_interpreter(script: Path) -> list[str]:
    """Return the words that start a Python program as a console script is started."""
    text = script.read_bytes().decode("utf-8", "replace")
    first_line = text.partition("\n")[0]
    if not first_line.startswith("#!"):
        raise _unknown(script, "it has no first line that begins with #!")
    # As the kernel reads it: the program up to the first space, then one argument without quotes.
    words = first_line[2:].split(maxsplit=1)
    if words and Path(words[0]).name == "env":
        words = _after_env(shlex.split(first_line[2:]), script)
    if words and Path(words[0]).name in _SHELLS:
        words = _from_trampoline(text, script)
    words = [word.strip() for word in words]
    if not words:
        raise _unknown(script, f"its first line is {first_line[:100]!r}")
    if shutil.which(words[0]) is None:
        raise _unknown(script, f"it names {words[0]}, which is not an executable file")
    return words


def _after_env(words: list[str], script: Path) -> list[str]:
    """Return the command that `/usr/bin/env` would start."""
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in _ENV_OPTIONS_WITH_VALUE and rest:
            rest.pop(0)
    if rest and _ASSIGNMENT.match(rest[0]):
        raise _unknown(script, "its first line sets variables")
    return rest


def _from_trampoline(text: str, script: Path) -> list[str]:
    """Return the interpreter that a shell script of an installer executes."""
    match = _TRAMPOLINE.search(text)
    if match is None:
        raise _unknown(script, "it is a shell script of another form than installers write")
    folder = shlex.quote(str(script.resolve().parent))
    return shlex.split(_RELATIVE.sub(lambda _: f"{folder}/", match["words"]))


def _unknown(script: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--inference_backend sglang: cannot tell which Python {script} runs in: {reason}; put the "
        "`sglang` command of SGLang's own environment first on PATH, or pass running servers with "
        "--inference_urls"
    )
