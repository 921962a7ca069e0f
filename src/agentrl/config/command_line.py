"""Command lines: configuration flags as options of click commands, and their help.

Input: an argv. Output: a `RootConfig` and the command's own options. `parse_flags` is a command
without own options, for programs other than `agentrl`.
"""

import asyncio
import inspect
import math
import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click

from agentrl.config.flags import (
    ALIASES,
    FLAGS,
    NO_EFFECT,
    ONE_VALUE,
    OPTIM_PARTS,
    ORIGINAL,
    SETTINGS,
    SHORTHANDS,
    USUAL,
    canonical_name,
    unknown_flag,
)
from agentrl.config.loading import load_config
from agentrl.config.sections import SECTIONS, RootConfig
from agentrl.errors import ConfigError

_WIDTH = 80
_INDENT = " " * 8
_FLAG_HINT = "write flags as --max_steps 10"
_DASHES = ("\u2013", "\u2014", "\u2212")
"""Dashes and the minus sign, which text editors put in place of hyphens."""
_NEGATIVE_NUMBER = re.compile(r"-\.?\d[\d.]*(?:[eE][+-]?\d+)?")
_SETTINGS = {"help_option_names": ["--help", "-h"]}
_SHORT_HELP_FLAGS = 25
"""A command with no more flags than this shows all of them in its `--help`."""


class Count(click.IntRange):
    """A whole number from 1 (or `least`) to `most`, as the value of a command's own option."""

    name = "whole number"

    def __init__(self, least: int = 1, most: int | None = None) -> None:
        super().__init__(least, most)


class Number(click.FloatRange):
    """A finite number, as the value of a command's own option."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


class Steps(click.ParamType[tuple[int, int]]):
    """A step, `7`, or several, `3-7`, as (first, last)."""

    name = "N or A-B"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Read the steps."""
        first, _, last = str(value).partition("-")
        bounds = (first, last or first)
        if not all(bound.isdecimal() for bound in bounds):
            self.fail(f"{value!r} is not a step; give 7 or 3-7", param, ctx)
        steps = (int(bounds[0]), int(bounds[1]))
        if not 1 <= steps[0] <= steps[1]:
            self.fail(
                f"{value!r}: steps are counted from 1, and the first must not exceed the last",
                param,
                ctx,
            )
        return steps


class FlagCommand(click.Command):
    """A command whose function takes the configuration, then the command's own parameters.

    Every flag of every section is accepted, so that one configuration file serves all commands;
    help shows only `sections`. An `async` function is run to completion.

    Attributes:
        sections: names of the sections that the command uses.
        own_params: its parameters in addition to the configuration's flags.
    """

    def __init__(
        self, *args: Any, sections: Sequence[str] = tuple(SECTIONS), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.context_settings = {
            **_SETTINGS,
            "token_normalize_func": canonical_name,
            "allow_extra_args": True,  # `parse_args` raises the error
        }
        self.own_params = list(self.params)
        self.params += [*_flag_options(), _HELP_ALL]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, except for values that begin with a hyphen.

        A flag's value that begins with "--" must follow a "=". A negative number is an argument.
        """
        takes_value = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            if not isinstance(param.flag_value, str)
            for name in param.opts
        }
        words: list[str] = []
        numbers: list[str] = []
        for word, following in pairwise(["", *args, "--"]):
            name = f"--{canonical_name(word)}"
            is_flag = word.startswith("--") and name in takes_value
            if is_flag and following.startswith("--"):
                raise click.BadOptionUsage(name, f"{name} needs a value", ctx)
            is_number = not is_flag and _NEGATIVE_NUMBER.fullmatch(following) is not None
            (numbers if is_number else words).append(following)
        typed = list(args)
        # The words end in "--", behind which click reads numbers as arguments.
        super().parse_args(ctx, args if "--" in args else [*words, *numbers])
        if ctx.args:
            raise click.UsageError(self._unexpected(ctx, typed), ctx)
        return ctx.args

    def _unexpected(self, ctx: click.Context, typed: list[str]) -> str:
        """Return the message about a word that is neither a flag nor a flag's value."""
        word = ctx.args[0]
        problem = f"unexpected argument {word!r}"
        if "=" in typed:
            return f"{problem}; write the = of a flag without spaces: --max_steps=10"
        if word.startswith(_DASHES):
            return (
                f"{problem}; a flag begins with two hyphens (--); some editors turn them into a "
                "dash"
            )
        for flag, _, following in zip(typed, typed[1:], typed[2:], strict=False):
            if following == word and flag.startswith("--") and "=" not in flag:
                name = canonical_name(flag)
                return f"{problem}; --{name} takes one value: put a value with spaces in quotes"
        usage = f"usage: {self.usage(ctx.command_path)}"
        return f"{problem}; {usage if self.own_params else _FLAG_HINT}"

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command's function."""
        own = {name: value for name, value in ctx.params.items() if name not in _FLAG_NAMES}
        assert self.callback is not None, "a command has a function"
        result = self.callback(load_config(given_flags(ctx)), **own)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def get_help(self, ctx: click.Context, *, complete: bool = False) -> str:
        """Return the help text: the common flags, or all flags with `complete`."""
        usage = f"usage: {self.usage(ctx.command_path)} [--flag value ...]"
        lines = [*textwrap.wrap(usage, _WIDTH, subsequent_indent=_INDENT), ""]
        lines += textwrap.wrap(" ".join((self.help or "").split()), _WIDTH)
        lines += [""] * bool(self.own_params)
        for option in self.own_params:
            if isinstance(option, click.Option):
                lines += _help_entry(_option_usage(option), option.help or "")
        return "\n".join([*lines, *_flag_lines(ctx.command_path, self.sections, complete)])

    def usage(self, path: str) -> str:
        """Return the command's usage, without the configuration's flags."""
        words = [path]
        for param in self.own_params:
            if isinstance(param, click.Option):
                word = _option_usage(param)
                words.append(word if param.required else f"[{word}]")
            else:
                words.append(param.make_metavar(_NO_CONTEXT))
        return " ".join(words)


class FlagGroup(click.Group):
    """A group of commands, such as `agentrl inspect`; each is a `FlagCommand`.

    Attributes:
        sections: names of the sections that its commands use, for help.
    """

    command_class = FlagCommand

    def __init__(self, *args: Any, sections: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False, **kwargs})
        self.sections = sections
        self.context_settings = dict(_SETTINGS)
        self.params.append(_HELP_ALL)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command that uses the sections of the group."""
        assert isinstance(cmd, FlagCommand)
        cmd.sections = self.sections
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of their definition."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names."""
        if args[0] not in self.list_commands(ctx):
            names = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"unknown command {args[0]!r}; one of {names}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, with an error where no command is given."""
        if not args:
            names = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"complete `{ctx.command_path}` with one of {names}", ctx)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context, *, complete: bool = False) -> str:
        """Return the help text: the commands, and the flags that they use."""
        lines = [f"usage: {ctx.command_path} COMMAND [--flag value ...]", ""]
        lines += textwrap.wrap(" ".join((self.help or "").split()), _WIDTH)
        lines.append("")
        for name, command in self.commands.items():
            assert isinstance(command, FlagCommand)
            usage = command.usage(f"{ctx.command_path} {name}")
            lines += textwrap.wrap(
                usage,
                _WIDTH,
                initial_indent="  ",
                subsequent_indent=_INDENT,
                break_on_hyphens=False,
            )
            text = " ".join((command.help or "").split())
            lines += textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        return "\n".join([*lines, *_flag_lines(ctx.command_path, self.sections, complete)])


def parse_flags(argv: Sequence[str]) -> RootConfig:
    """Return the configuration that a program's command line gives.

    Raises:
        ConfigError: an unknown flag (the message names the nearest one), a missing or impossible
            value, or an unreadable file.
    """
    command = FlagCommand("agentrl", callback=lambda config: config)
    try:
        with command.make_context("agentrl", list(argv)) as ctx:
            config: RootConfig = command.invoke(ctx)
            return config
    except click.UsageError as error:
        raise ConfigError(usage_problem(error)) from None


def given_flags(ctx: click.Context) -> dict[str, str]:
    """Return the configuration's flags that were typed, by name."""
    return {
        name: value
        for name, value in ctx.params.items()
        if name in _FLAG_NAMES and value is not None
    }


def usage_problem(error: click.UsageError) -> str:
    """Return a one-line description of an invalid command line, with the nearest valid one."""
    message = error.format_message().rstrip(".")
    if not isinstance(error, click.NoSuchOption):
        is_ours = isinstance(error, click.BadOptionUsage) or type(error) is click.UsageError
        return message if is_ours else message[:1].lower() + message[1:]
    if not error.option_name.startswith("--"):
        return f"unexpected argument {error.option_name!r}; {_FLAG_HINT}"
    name, ctx = canonical_name(error.option_name), error.ctx
    if ctx is not None and isinstance(ctx.command, click.Group) and name in _FLAG_NAMES:
        names = ", ".join(ctx.command.list_commands(ctx))
        return f"complete `{ctx.command_path}` with one of {names}, then --{name}"
    group = None if ctx is None or ctx.parent is None else ctx.parent.command
    if ctx is not None and isinstance(group, FlagGroup):
        # An option of another command of the group is misplaced rather than misspelled.
        for other in group.commands.values():
            if any(f"--{name}" in param.opts for param in other.params):
                path = ctx.command_path.replace(str(ctx.info_name), str(other.name))
                return f"`{ctx.command_path}` has no --{name}, but `{path}` does"
    return unknown_flag(name)


def option_value(option: click.Parameter) -> str:
    """Return the placeholder of an option's value, its choices, or nothing for a switch."""
    if isinstance(option, click.Option) and option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(option.type.choices)
    return option.metavar or ("N" if isinstance(option.type, Count) else "TEXT")


def _flag_options() -> list[click.Option]:
    """Return one option per flag; values remain text until `load_config` converts them."""
    value_is_optional = {name for name, flag in SETTINGS.items() if flag.is_bool}
    value_is_optional |= NO_EFFECT.keys() | ONE_VALUE.keys() | SHORTHANDS.keys()
    return [
        click.Option([f"--{name}"], type=click.UNPROCESSED, is_flag=False, flag_value="true")
        if name in value_is_optional
        else click.Option([f"--{name}"], type=click.UNPROCESSED)
        for name in _FLAG_NAMES
    ]


def _flag_lines(path: str, sections: Sequence[str], complete: bool) -> list[str]:
    """Return the help of the configuration's flags, by section."""
    lines = ["", "All commands share these flags; --config FILE reads them from YAML."]
    used = [flag for flag in FLAGS.values() if flag.section in sections]
    shown = used
    if not complete and len(used) > _SHORT_HELP_FLAGS:
        shown = [flag for flag in used if flag.name in USUAL]
    for section in sections:
        flags = [flag for flag in shown if flag.section == section]
        if flags:
            lines += ["", f"{section}: {(SECTIONS[section].__doc__ or '').strip()}"]
        for flag in flags:
            lines += _help_entry(f"--{flag.name} {flag.metavar}".rstrip(), flag.help)
    if len(shown) < len(used):
        lines += ["", f"`{path} --help-all` explains {len(used) - len(shown)} further flags."]
    if complete:
        ignored = ", ".join(f"--{name}" for name in (*NO_EFFECT, *ONE_VALUE))
        lines += ["", *_help_entry("accepted but ignored:", ignored)]
        original = ", ".join(f"--{name}" for name in ORIGINAL)
        lines += ["", *_help_entry("of the original AgentRL (docs/advanced.md):", original)]
        replacements = ALIASES | {name: " ".join(given) for name, given in SHORTHANDS.items()}
        spellings = ", ".join(f"--{name} (--{flag})" for name, flag in replacements.items())
        lines += ["", *_help_entry("other spellings:", spellings)]
    return lines


def _show_all_help(ctx: click.Context, _: click.Parameter, is_requested: bool) -> None:
    if is_requested and isinstance(ctx.command, FlagCommand | FlagGroup):
        click.echo(ctx.command.get_help(ctx, complete=True))
        ctx.exit()


def _option_usage(option: click.Parameter) -> str:
    """Return an option's name, with a placeholder for its value if it takes one."""
    return f"{option.opts[0]} {option_value(option)}".rstrip()


def _help_entry(head: str, text: str) -> list[str]:
    name, _, value = head.partition(" ")
    if len(value) > _WIDTH - len(_INDENT):  # choices that no line holds break after a `|`
        half = value.rfind("|", 0, _WIDTH - len(_INDENT)) + 1
        head = f"{name} {value[:half]} {value[half:]}"
    return textwrap.wrap(
        f"{head}  {text}",
        _WIDTH,
        initial_indent="  ",
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


_FLAG_NAMES = (
    *("config", *FLAGS, *ORIGINAL),
    *(*NO_EFFECT, *ONE_VALUE, *OPTIM_PARTS, *SHORTHANDS),
)
_NO_CONTEXT = click.Context(click.Command("agentrl"))
_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all_help
)
