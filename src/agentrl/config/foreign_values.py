"""Values of flags that somebody else chose: those of a bundle, or of a run's database.

They are numbers and plain texts. What they name beyond that (code, a path, a command, an address) is used
only if the user gives it too.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.config.flags import SETTINGS
from agentrl.errors import ConfigError

_MAX_SHOWN = 60


def check_foreign(values: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Refuse values that name something which the user's own values do not.

    Args:
        values: by flag.
        own: the user's values by flag.
        where: where the others come from, for the message.

    Raises:
        ConfigError: there is such a value.
    """
    for name, value in values.items():
        flag = SETTINGS[name]
        if not flag.is_plain(value) and own.get(name) != value:
            raise ConfigError(
                f"{where} sets --{name} to {repr(value)[:_MAX_SHOWN]}, and only you can name "
                f"{flag.names.what}: if you trust it, give {flag.typed} yourself"
            )
