"""Formulas by name: the built-in ones, and the user's by `file.py:name` or `package.module:name`.

Both are plain functions of one frozen dataclass of inputs, so every built-in one is an example.
"""

import importlib
import inspect
import traceback
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Generic, TypeVar

from agentrl.config.user_code import load_reference, users_place
from agentrl.errors import AgentRLError, ConfigError, UserCodeError

Formula = TypeVar("Formula", bound=Callable[..., Any])


class FormulaRegistry(Generic[Formula]):
    """The formulas that one flag selects."""

    def __init__(self, flag: str, kind: str, built_in: str | None = None) -> None:
        """Start without formulas.

        Args:
            flag: name of the flag.
            kind: what the formulas are, for messages: `loss`.
            built_in: dotted name of the module that registers the built-in ones when the first is
                needed; None: they are registered already.
        """
        self._flag = flag
        self._kind = kind
        self._module = built_in
        self._built_in: dict[str, Formula] = {}

    def register(self, name: str) -> Callable[[Formula], Formula]:
        """Return a decorator that adds a built-in formula."""

        def add(formula: Formula) -> Formula:
            self._built_in[name] = formula
            return formula

        return add

    def formula(self, name: str) -> Formula:
        """Return a formula by its name or reference."""
        if self._module is not None:
            importlib.import_module(self._module)
        if name in self._built_in:
            return self._built_in[name]
        if ":" in name:
            formula: Formula = users_function(name, f"--{self._flag}")
            return formula
        known = ", ".join(self._built_in)
        raise ConfigError(f"unknown {self._kind} {name!r}; supported are {known}")


@cache
def users_function(reference: str, flag: str) -> Any:
    """Return the user's function that a flag names; its exceptions become `UserCodeError`."""
    function = load_reference(reference, flag)
    if not inspect.isfunction(inspect.unwrap(function)):
        raise ConfigError(f"{flag} {reference}: it is no function; name one that `def` defines")

    @wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except (AgentRLError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            stack = traceback.extract_tb(error.__traceback__)
            place = f"{users_place(stack)}: "
            text = " ".join(str(error).split())
            if isinstance(error, SystemExit):
                text += " (it exits the program instead of returning)"
            if len(stack) == 1:  # the call itself failed, and not what the function does
                place = ""
                text += "; it is called with one object"
                text += " and, by name, what --loss_args holds" * (flag == "--loss_calculator")
            raise UserCodeError(
                f"{flag} {reference}: {place}{type(error).__name__}: {text}"
            ) from error

    return call
