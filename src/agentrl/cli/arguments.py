"""Words and switches that a command has beside the flags of the configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


@dataclass(frozen=True)
class Action:
    """One action of a command: what it takes and what it does."""

    help: str
    operand: str | None = None
    """Name of the word that follows the action, as in `inspect record RECORD_ID`."""
    switches: tuple[str, ...] = ()
    """Flags without a value."""
    options: tuple[str, ...] = ()
    """Flags with a value."""


@dataclass(frozen=True)
class Asked:
    """What the user asked for."""

    action: str
    operand: str
    switches: frozenset[str]
    options: Mapping[str, str]
    config: RootConfig

    def number(self, option: str, default: int) -> int:
        """Return an option as a whole number from 1.

        Raises:
            ConfigError: it is none.
        """
        value = self.options.get(option, str(default))
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--{option} {value}: must be a whole number from 1")
        return int(value)


def parse_action(command: str, actions: Mapping[str, Action], argv: Sequence[str]) -> Asked:
    """Split `argv` into the action, its operand, its own flags and the configuration.

    Raises:
        ConfigError: a word or flag is unknown, missing or misplaced.
    """
    words: list[str] = []
    switches: set[str] = set()
    options: dict[str, str] = {}
    rest: list[str] = []
    own_switches = {name for action in actions.values() for name in action.switches}
    own_options = {name for action in actions.values() for name in action.options}
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        name, has_value, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--"):
            words.append(argument)
        elif name in own_switches:
            switches.add(name)
        elif name in own_options:
            if not has_value:
                if position == len(argv) or argv[position].startswith("--"):
                    raise ConfigError(f"--{name} needs a value")
                value = argv[position]
                position += 1
            options[name] = value
        else:
            rest.append(argument)
            if not has_value and position < len(argv) and not argv[position].startswith("--"):
                rest.append(argv[position])
                position += 1
    config = parse_flags(rest)
    return _checked(command, actions, words, Asked("", "", frozenset(switches), options, config))


def usage(command: str, actions: Mapping[str, Action]) -> list[str]:
    """Return one line an action, for help texts."""
    lines = []
    for name, action in actions.items():
        words = [name, *([action.operand] if action.operand else [])]
        words += [f"[--{switch}]" for switch in action.switches]
        words += [f"[--{option} VALUE]" for option in action.options]
        lines.append(f"  agentrl {command} {' '.join(words)}")
        lines.append(f"        {action.help}")
    return lines


def _checked(command: str, actions: Mapping[str, Action], words: list[str], asked: Asked) -> Asked:
    if not words:
        raise ConfigError(f"say `agentrl {command}` and one of {', '.join(actions)}")
    name, *operands = words
    if name not in actions:
        raise ConfigError(f"unknown action {name!r}; one of {', '.join(actions)}")
    action = actions[name]
    foreign = [
        flag
        for flag in (*sorted(asked.switches), *sorted(asked.options))
        if flag not in action.switches and flag not in action.options
    ]
    if foreign:
        raise ConfigError(f"`agentrl {command} {name}` takes no --{foreign[0]}")
    if len(operands) != (action.operand is not None):
        wanted = action.operand or "nothing more"
        given = " ".join(operands) or "nothing"
        raise ConfigError(f"`agentrl {command} {name}` takes {wanted}, not {given}")
    return Asked(name, "".join(operands), asked.switches, asked.options, asked.config)
