"""Scorers by name: registered functions that turn an answer and the right answers into a `Score`.

A scorer that cannot decide raises `ScoringError`; the score then stays missing and is tried again.
Whatever else it raises is a `ScorerDefect` unless an outage is behind it. Neither becomes a 0.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack, overload

from agentrl.config.user_code import load_user_module
from agentrl.errors import ConfigError
from agentrl.rewards.agent_config import AgentConfig
from agentrl.rewards.scoring_failures import as_number, as_scoring_error
from agentrl.schema import GroundTruth, Score


@dataclass(frozen=True)
class Verdict:
    """What a scoring function may return in place of a bare number."""

    value: float
    detail: str = ""
    """For people who read the record: a judge's words, the normalised answers."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """What the verdict depended on beside the answer and the reference (a judge's model)."""


ScoringFunction = Callable[..., float | Verdict | Awaitable[float | Verdict]]
"""`(answer, truth)` or `(answer, truth, agent_config)`, plain or async."""

ENTRY_POINTS = "agentrl.scorers"
"""Group of entry points by which installed packages bring scoring functions."""

# Not the event loop's default pool: slow scorers would block its name look-ups and file reads.
_threads = ThreadPoolExecutor(4, thread_name_prefix="scorer")

_Function = TypeVar("_Function", bound=ScoringFunction)


class ScorerTraits(TypedDict, total=False):
    """What a scoring function declares about itself."""

    version: str
    """Stored with every score (default "1"); change it when the function changes."""
    needs_judge: bool
    """The function uses `agent_config.scorer_agent`."""
    needs_answer: bool
    """The function compares: a question without a reference answer is refused."""


@dataclass(frozen=True)
class Scorer:
    """A registered scoring function."""

    name: str
    function: ScoringFunction
    takes_config: bool
    version: str = "1"
    needs_judge: bool = False
    needs_answer: bool = False

    def check(self, config: AgentConfig | None) -> None:
        """Raise ConfigError if the scorer cannot work with this configuration."""
        if not self.needs_judge:
            return
        if config is None:
            raise ConfigError(f"scorer {self.name!r} is a model: name its file, agent_config_path")
        config.judge_settings()

    async def score(
        self, answer: str | None, truth: GroundTruth, config: AgentConfig | None = None
    ) -> Score:
        """Score an answer; a missing answer scores 0.

        Raises:
            ScoringError: the scorer could not decide.
            ScorerDefect: the function raised, or returned no finite number.
            ConfigError: the scorer needs a configuration that it was not given.
        """
        inputs = {
            "answer": answer,
            "reference": truth.answer,
            "aug_answers": list(truth.aug_answers),
        }
        if answer is None:
            verdict = Verdict(0.0, detail="no answer")
        else:
            verdict = await self._verdict(answer, truth, config)
        return Score(
            scorer=self.name,
            version=self.version,
            value=verdict.value,
            detail=verdict.detail,
            inputs={**inputs, **verdict.inputs},
        )

    async def _verdict(
        self, answer: str, truth: GroundTruth, config: AgentConfig | None
    ) -> Verdict:
        arguments = (answer, truth, config) if self.takes_config else (answer, truth)
        try:
            if inspect.iscoroutinefunction(self.function):
                result = await self.function(*arguments)
            else:
                # A slow function must not hold up the rollouts that share the event loop.
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(_threads, self.function, *arguments)
                if inspect.isawaitable(result):
                    result = await result
        except Exception as error:
            failure = as_scoring_error(error, f"scorer {self.name!r}")
            if failure is error:
                raise
            raise failure from error
        verdict = result if isinstance(result, Verdict) else Verdict(value=result)
        return replace(verdict, value=as_number(verdict.value, f"scorer {self.name!r}"))


class MCPScorerFactory:
    """The scorers that a task may name: registered ones, and those of installed packages.

    Example:
        @MCPScorerFactory.register_scorer("length")
        def length(answer: str, truth: GroundTruth) -> float:
            return 1.0 if len(answer) <= 10 else 0.0
    """

    _scorers: ClassVar[dict[str, Scorer]] = {}

    @overload
    @classmethod
    def register_scorer(
        cls, name: str, function: _Function, **traits: Unpack[ScorerTraits]
    ) -> _Function: ...

    @overload
    @classmethod
    def register_scorer(
        cls, name: str, function: None = ..., **traits: Unpack[ScorerTraits]
    ) -> Callable[[_Function], _Function]: ...

    @classmethod
    def register_scorer(
        cls, name: str, function: _Function | None = None, **traits: Unpack[ScorerTraits]
    ) -> _Function | Callable[[_Function], _Function]:
        """Make a scoring function known under `name`; a decorator when given no function.

        A function registered under a name that is taken replaces the former one.

        Args:
            name: what tasks call it.
            function: `(answer, truth)` or `(answer, truth, agent_config)`, plain or async;
                returns a number or a `Verdict`. Plain functions run in a thread.
            **traits: see `ScorerTraits`.

        Raises:
            ConfigError: the function takes another number of arguments.
        """

        def register(function: _Function) -> _Function:
            cls._scorers[name] = Scorer(name, function, _takes_config(name, function), **traits)
            return function

        return register if function is None else register(function)

    @classmethod
    def get_scorer(cls, name: str) -> Scorer:
        """Return the scorer of that name.

        Raises:
            ConfigError: there is none (the known ones are listed), or the package that brings it
                fails on import.
        """
        if name not in cls._scorers:
            cls._load_installed(name)
        if name in cls._scorers:
            return cls._scorers[name]
        near = get_close_matches(name, cls.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown scorer {name!r}{hint} (known: {', '.join(cls.names())})")

    @classmethod
    def check_question(cls, name: str, has_answer: bool) -> None:
        """Refuse a question that its scorer cannot judge.

        Raises:
            ConfigError: there is no scorer of that name, or it needs a reference answer.
        """
        if cls.get_scorer(name).needs_answer and not has_answer:
            raise ConfigError(f"scorer {name!r} compares with an answer, and there is none")

    @classmethod
    def names(cls) -> list[str]:
        """Return all known names, sorted."""
        return sorted({*cls._scorers, *entry_points(group=ENTRY_POINTS).names})

    @classmethod
    def _load_installed(cls, name: str) -> None:
        """Register the scoring function that an installed package brings under this name."""
        found = entry_points(group=ENTRY_POINTS)
        if name not in found.names:
            return
        try:
            function = found[name].load()
        except Exception as error:
            raise ConfigError(f"scorer {name!r}: {type(error).__name__}: {error}") from error
        # Its module may have registered it by the decorator, with a version of its own.
        if name not in cls._scorers:
            cls.register_scorer(name, function)


def _takes_config(name: str, function: ScoringFunction) -> bool:
    if not callable(function):
        raise ConfigError(f"scorer {name!r}: {function!r} is no function")
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    if len(required) > 3 or len(positional) < 2:
        raise ConfigError(
            f"scorer {name!r}: a scoring function takes (answer, truth) or "
            "(answer, truth, agent_config)"
        )
    # A third one with a default may be the user's own (`tolerance=0.1`).
    return len(required) == 3 or (len(positional) >= 3 and "config" in positional[2].name)


def load_scorer_module(source: str | Path) -> None:
    """Import a Python file (or a module by its dotted name) that registers scorers.

    Raises:
        ConfigError: it is missing or fails on import.
    """
    load_user_module(source, f"scorer module {source}")
