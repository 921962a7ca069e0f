"""The code blocks of a page, as somebody who follows it would type them in."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"(?:#|//) (\S+\.\w+)\n")
_COMMAND_SECONDS = 45


def write_blocks(page: str, folder: Path) -> tuple[int, list[str]]:
    """Write the named blocks of a page to files; return how many blocks it has, and the shell's."""
    blocks = _BLOCK.findall((DOCS / page).read_text())
    commands = []
    for language, text in blocks:
        named = _FILE_NAME.match(text)
        if language == "bash":
            commands.append(text)
        elif language != "text":  # what a command prints
            assert named is not None, f"a block of {language} without a file name"
            body = text if language == "python" else text[named.end() :]
            (folder / named[1]).write_text(body)
    return len(blocks), commands


def documented_blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the blocks of a language in README.md and the pages, each with the name of its page."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        for name, text in _BLOCK.findall(page.read_text()):
            if name == language:
                yield page.name, text


def documented_queries() -> list[str]:
    """Return the statements of all `js` blocks of README.md and the pages; each begins with `db.`."""
    blocks = [text for _, text in documented_blocks("js")]
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("//")]
    parts = re.split(r"^(?=db\.)", "\n".join(lines), flags=re.MULTILINE)
    return [part.strip() for part in parts if part.strip()]


def run_shell(
    text: str, folder: Path, environment: Mapping[str, str], seconds: int = _COMMAND_SECONDS
) -> str:
    """Run a block of the shell's; return what it printed."""
    done = subprocess.run(
        ["timeout", str(seconds), "bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
