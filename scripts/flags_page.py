"""Writes docs/flags.md and docs/advanced.md from the configuration's sections and the commands.

.venv/bin/python scripts/flags_page.py            write the pages
.venv/bin/python scripts/flags_page.py --check    fail if a page differs
"""

import re
import sys
from collections.abc import Iterator

import click
from written_page import ROOT, write_or_check

from agentrl.cli.main import agentrl
from agentrl.config.command_line import FlagCommand, FlagGroup, option_value
from agentrl.config.flags import (
    ADVANCED,
    ALIASES,
    FLAGS,
    NO_EFFECT,
    ONE_VALUE,
    OPTIM_PARTS,
    ORIGINAL,
    SETTINGS,
    SHORTHANDS,
    Flag,
)
from agentrl.config.rules import RULES
from agentrl.config.sections import SECTIONS

PAGE = ROOT / "docs/flags.md"
ADVANCED_PAGE = ROOT / "docs/advanced.md"
INTRODUCTION = """\
# Flags

<!-- Written by scripts/flags_page.py from the field docstrings. -->

Every command accepts every flag, so that one file, read with `--config FILE`, serves all commands. Each
section lists the commands that use it. Further options belong to [single commands](#options-of-single-commands).
`agentrl COMMAND --help` explains the common flags, and `agentrl COMMAND --help-all` explains all that the
command uses. `_` and `-` are equivalent.

A switch needs no value: `--fresh` means `--fresh true`. A flag without a default is unset until you give it.
Settings that runs rarely change have no flag: see [Advanced settings](advanced.md).
"""
ADVANCED_INTRODUCTION = """\
# Advanced settings

<!-- Written by scripts/flags_page.py from the field docstrings. -->

These settings have no flag. A file that `--config FILE` names sets them below `advanced:`; in Python, they are
values like any other.

```yaml
run_name: mine
advanced:
  lease_seconds: 60
```

Those with a `*` are flags of the original AgentRL, which every command accepts, too.
"""


def rows(head: str, lines: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield a table."""
    yield f"\n{head}\n|{'---|' * (head.count('|') - 1)}\n"
    for cells in lines:
        yield f"| {' | '.join(cells)} |\n"


def code(*texts: str) -> str:
    """Return texts as code, separated by commas; nothing for empty ones."""
    return ", ".join(f"`{text}`" for text in texts if text)


def linked(text: str) -> str:
    """Return a help text in Markdown: asterisks are escaped, and pages are links."""
    text = text.replace("*", r"\*")
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](\1)", text)


def row(flag: Flag, name: str) -> tuple[str, ...]:
    """Return a setting as name, values, default, description."""
    values = flag.metavar.split("|") if flag.metavar else ["true", "false"]
    return name, code(*values), code(flag.default), linked(flag.description)


def flags_of(section: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a section."""
    for flag in FLAGS.values():
        if flag.section == section:
            yield row(flag, code(f"--{flag.name}"))


def advanced() -> Iterator[str]:
    """Yield the pieces of the page of settings without a flag."""
    yield ADVANCED_INTRODUCTION
    settings = (SETTINGS[name] for name in sorted(ADVANCED))
    yield from rows(
        "| setting | value | default | |",
        (row(one, code(one.name) + r" \*" * (one.name in ORIGINAL)) for one in settings),
    )


def commands() -> dict[str, FlagCommand | FlagGroup]:
    """Return the commands of `agentrl` by name."""
    context = click.Context(agentrl, info_name="agentrl")
    found = {name: agentrl.get_command(context, name) for name in agentrl.list_commands(context)}
    return {name: one for name, one in found.items() if isinstance(one, FlagCommand | FlagGroup)}


def own_options() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the options that only one command has."""
    for name, command in commands().items():
        parts = command.commands.items() if isinstance(command, FlagGroup) else [("", command)]
        for part, one in parts:
            assert isinstance(one, FlagCommand)
            for option in one.own_params:
                if isinstance(option, click.Option):
                    values = code(*option_value(option).split("|"))
                    path = f"agentrl {name} {part}".strip()
                    yield code(path), code(option.opts[0]), values, linked(option.help or "")


def other_spellings() -> Iterator[tuple[str, ...]]:
    """Yield the rows of spellings that stand for a flag."""
    for name, flag in ALIASES.items():
        yield code(f"--{name}"), code(f"--{flag}")
    for name, (flag, value) in SHORTHANDS.items():
        yield code(f"--{name}"), code(f"--{flag} {value}")
    for name, argument in OPTIM_PARTS.items():
        yield code(f"--{name} X"), code(f"--optim_args {argument}=X")


def ignored() -> Iterator[tuple[str, ...]]:
    """Yield the rows of flags that change nothing."""
    reasons = {
        **{f"--{name}": reason for name, reason in NO_EFFECT.items()},
        **{f"--{name} {value}": reason for name, (value, reason) in ONE_VALUE.items()},
    }
    for name, reason in reasons.items():
        yield code(name), re.sub(r"--\w+", r"`\g<0>`", reason)


def excluded() -> Iterator[tuple[str, ...]]:
    """Yield the rows of flags that need or exclude one another."""
    for rule in RULES:
        word = "needs" if rule.is_need else "excludes"
        first, second = (
            " or ".join(map(code, side.split("|"))) for side in (rule.first, rule.second)
        )
        yield first, word, second, linked(rule.reason)


def written() -> Iterator[str]:
    """Yield the pieces of the page."""
    yield INTRODUCTION
    for section, fields in SECTIONS.items():
        used_by = [name for name, one in commands().items() if section in one.sections]
        yield f"\n## {section}\n\n{(fields.__doc__ or '').strip()}\n\nCommands: {code(*used_by)}.\n"
        yield from rows("| flag | value | default | |", flags_of(section))
    yield "\n## Options of single commands\n"
    yield from rows("| command | option | value | |", own_options())
    yield "\n## Needs and exclusions\n"
    yield from rows("| with | | | |", excluded())
    yield "\n## Other spellings\n\nSee also [Coming from elsewhere](coming-from.md).\n"
    yield from rows("| spelling | flag |", other_spellings())
    yield "\n## Accepted without effect\n"
    yield from rows("| flag | reason |", ignored())


if __name__ == "__main__":
    pages = ((PAGE, written()), (ADVANCED_PAGE, advanced()))
    sys.exit(
        max(write_or_check(page, text, description=__doc__, source="code") for page, text in pages)
    )
