"""Scorers by name: registered functions that compute a `Score` from an answer and the reference answers.

A scorer that cannot decide raises `ScoringError`; the score then stays missing and is retried. Any
other exception is a `ScorerDefect` unless an outage caused it. Neither becomes a 0.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, Unpack, overload

from agentrl.config.user_code import load_user_module
from agentrl.errors import ConfigError, ScorerDefect, ScoringError
from agentrl.rewards.agent_config import AgentConfig
from agentrl.rewards.rollout_view import NeedsWorld, Rollout
from agentrl.rewards.scorer_process import ScorerProcess
from agentrl.rewards.scorer_threads import ScorerThreads
from agentrl.rewards.scoring_failures import as_number, as_scoring_error
from agentrl.schema import GroundTruth, Record, Score


@dataclass(frozen=True)
class Verdict:
    """Result of a scoring function with details in addition to the number."""

    value: float
    detail: str = ""
    """Details for readers of the record: a judge's reply, the normalized answers."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """Inputs of the verdict in addition to answer and reference (a judge's model)."""
    parts: dict[str, float] = field(default_factory=dict)
    """Components of the value, by name; for display."""


ScoringFunction = Callable[..., Any]
"""`(answer, truth)`, plain or async, which returns a number or a `Verdict`. Parameters named `rollout` and
`agent_config` may follow: what was done (`Rollout`; the answer is then None if there is none), and the
models that it may call. With `sees_group`, the first parameter is `records`, and it returns one of
these for each record."""

ENTRY_POINTS = "agentrl.scorers"
"""Entry point group in which installed packages register scoring functions."""

MAX_SECONDS = 300.0
"""Default timeout of a scoring function; a judge's own timeouts are shorter."""
# Not the event loop's default pool: slow scorers would block its name look-ups and file reads.
_threads = ScorerThreads(4)
_processes: dict[str, ScorerProcess] = {}
"""Processes of the scorers that a file or module registers, by its name."""

_TERM = re.compile(r"\s*(?:(-?\d*\.?\d+)\s*\*\s*)?([^\s+*]+)\s*")
Extra = Literal["config", "rollout"]
WORLD = "world"
"""Where the inputs of a score hold what the rollout's tools told its function (`Rollout.facts`)."""
_Function = TypeVar("_Function", bound=ScoringFunction)


class ScorerTraits(TypedDict, total=False):
    """The declared properties of a scoring function."""

    version: str
    """Stored with every score (default "1"); change it when the function changes."""
    needs_judge: bool
    """The function uses `agent_config.scorer_agent`."""
    needs_answer: bool
    """The function needs a reference answer: questions without one are refused."""
    sees_group: bool
    """The function scores all rollouts of a question together, after the last one has ended: its
    first argument is their Records, with the answers in `final_answer`."""
    compares_text: bool
    """The function needs a text reference: questions whose answer is a list or an object are refused."""
    check_answer: Callable[[Any], str | None]
    """Returns why the function cannot use a reference answer, or None; such questions are refused."""
    isolated: bool
    """The function runs in a separate process if its file registers it (default True); otherwise in
    the sampler, whose objects it shares and whose event loop it must not block."""


@dataclass(frozen=True)
class Scorer:
    """A registered scoring function."""

    name: str
    function: ScoringFunction
    extras: tuple[Extra, ...] = ()
    """What the function takes after answer and truth."""
    version: str = "1"
    needs_judge: bool = False
    needs_answer: bool = False
    sees_group: bool = False
    compares_text: bool = False
    check_answer: Callable[[Any], str | None] | None = None
    isolated: bool = True
    source: str | None = None
    """The file or module that registers it in other processes; None if only this process has it."""

    @property
    def takes_config(self) -> bool:
        """Whether the function may call models."""
        return "config" in self.extras

    @property
    def takes_rollout(self) -> bool:
        """Whether the function is given what was done, and asks the rollout's tools."""
        return "rollout" in self.extras

    def check(self, config: AgentConfig | None) -> None:
        """Raise ConfigError if the scorer cannot work with this configuration."""
        if not self.needs_judge:
            return
        if config is None:
            raise ConfigError(f"scorer {self.name!r} calls a model: give --agent_config_path")
        config.judge_settings()

    async def score(
        self,
        answer: str | None,
        truth: GroundTruth,
        config: AgentConfig | None = None,
        *,
        rollout: Rollout | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> Score:
        """Score an answer; a missing answer scores 0, unless the function takes the rollout.

        Args:
            answer: the final answer of the rollout.
            truth: the question, and its right answers.
            config: the models that the function may call.
            rollout: what was done, for functions that take it; with its world, as long as there is
                one.
            max_seconds: timeout of the function.

        Raises:
            ScoringError: the scorer could not decide.
            ScorerDefect: the function raised, returned no finite number, timed out, or exited its
                process.
            ConfigError: the scorer needs a configuration that it was not given.
        """
        if self.sees_group:
            raise ConfigError(
                f"scorer {self.name!r} scores all rollouts of a question together; this is a "
                "single one"
            )
        if not self.takes_rollout:
            rollout = None
        elif rollout is None:
            raise ConfigError(f"scorer {self.name!r} takes the rollout; this is a single answer")
        if answer is None and rollout is None:
            return self._score(Verdict(0.0, detail="no answer"), answer, truth)
        try:
            (verdict,) = await self._run(max_seconds, answer, truth, config, rollout)
        except NeedsWorld as need:
            assert rollout is not None
            informed = await rollout.informed(need.request)
            return await self.score(
                answer, truth, config, rollout=informed, max_seconds=max_seconds
            )
        if rollout is not None and rollout.facts:
            verdict = replace(verdict, inputs=verdict.inputs | {WORLD: rollout.facts})
        return self._score(verdict, answer, truth)

    async def score_group(
        self,
        records: Sequence[Record],
        truth: GroundTruth,
        config: AgentConfig | None = None,
        *,
        max_seconds: float = MAX_SECONDS,
    ) -> list[Score]:
        """Score all rollouts of a question that have ended, in their order.

        Raises:
            ScoringError: see `score`.
        """
        verdicts = await self._run(max_seconds, tuple(records), truth, config, None)
        pairs = zip(records, verdicts, strict=True)
        return [self._score(verdict, record.final_answer, truth) for record, verdict in pairs]

    async def _run(self, max_seconds: float, *arguments: Any) -> list[Verdict]:
        if self.source is None or not self.isolated:
            return await self.score_here(max_seconds, *arguments)
        if self.source not in _processes:
            _processes[self.source] = ScorerProcess(self.source)
        verdicts = await _processes[self.source].score(self.name, max_seconds, *arguments)
        return [Verdict(**one) for one in verdicts]

    async def score_here(
        self,
        max_seconds: float,
        scored: str | tuple[Record, ...] | None,
        truth: GroundTruth,
        config: AgentConfig | None,
        rollout: Rollout | None,
    ) -> list[Verdict]:
        """Return the verdict on an answer, or those on the rollouts of a group, from this process.

        Raises:
            ScoringError: see `score`.
            NeedsWorld: the function needs another fact of the rollout's tools.
        """
        extras = {"config": config, "rollout": rollout}
        arguments = (truth, *(extras[name] for name in self.extras))
        try:
            result = await self._call(max_seconds, scored, *arguments)
        finally:
            if rollout is not None:
                rollout.check_facts()
        if not isinstance(scored, tuple):
            return [self._as_verdict(result)]
        is_list = isinstance(result, Iterable) and not isinstance(result, str | Mapping)
        items = list(islice(result, len(scored) + 1)) if is_list else []
        verdicts = [self._as_verdict(one) for one in items]
        if len(verdicts) != len(scored):
            got = len(verdicts) if is_list else f"a {type(result).__name__}"
            text = f"scorer {self.name!r} returned {got} for {len(scored)} records"
            raise ScorerDefect(text, kind=text)
        return verdicts

    async def _call(self, max_seconds: float, *arguments: Any) -> Any:
        """Return the function's result; its exceptions become `ScoringError`s."""
        label = f"scorer {self.name!r}"
        limit = asyncio.timeout(max_seconds)
        try:
            result: Any
            if inspect.iscoroutinefunction(self.function):
                result = self.function(*arguments)
            else:
                # A slow function must not block the event loop.
                result = await _threads.run(label, max_seconds, self._call_function, *arguments)
            async with limit:
                return await result if inspect.isawaitable(result) else result
        except SystemExit as end:
            text = f"{label} exited the program ({end.code}) instead of returning a score"
            raise ScorerDefect(text, kind=text) from end
        except Exception as error:
            if limit.expired():
                raise ScoringError(f"{label} returned no score within {max_seconds:g} s") from None
            failure = as_scoring_error(error, label)
            if failure is error:
                raise
            raise failure from error

    def _call_function(self, scored: Any, *arguments: Any) -> Any:
        """Call the function; if it is a generator, collect its values here, where its code runs."""
        result = self.function(scored, *arguments)
        if self.sees_group and isinstance(result, Iterator):
            return list(islice(result, len(scored) + 1))
        return result

    def _as_verdict(self, result: object) -> Verdict:
        label = f"scorer {self.name!r}"
        if not isinstance(result, Verdict):
            return Verdict(as_number(result, label))
        parts = {name: as_number(part, f"{label}: {name}") for name, part in result.parts.items()}
        return replace(result, value=as_number(result.value, label), parts=parts)

    def _score(self, verdict: Verdict, answer: str | None, truth: GroundTruth) -> Score:
        inputs = {
            "answer": answer,
            "reference": truth.answer,
            "aug_answers": list(truth.aug_answers),
        }
        return Score(
            scorer=self.name,
            version=self.version,
            value=verdict.value,
            detail=verdict.detail,
            inputs={**inputs, **verdict.inputs},
            parts=verdict.parts,
        )


class MCPScorerFactory:
    """The scorers that a task may name: registered ones, and those of installed packages.

    Example:
        @MCPScorerFactory.register_scorer("length")
        def length(answer: str, truth: GroundTruth) -> float:
            return 1.0 if len(answer) <= 10 else 0.0
    """

    _scorers: ClassVar[dict[str, Scorer]] = {}
    _source: ClassVar[str | None] = None
    """The file or module that is being loaded, if any."""

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
        """Register a scoring function as `name`; acts as a decorator if no function is given.

        Registering an existing name replaces its function.

        Functions of a `--scorer_module` and of installed packages run in a separate process. Plain
        (not async) functions run in a thread, there as well as in the sampler.

        Args:
            name: the name by which tasks refer to it.
            function: a `ScoringFunction`.
            **traits: see `ScorerTraits`.

        Raises:
            ConfigError: the function has the wrong number of parameters, or the name is missing.
        """
        if not isinstance(name, str):
            raise ConfigError(
                "a scorer needs a name for questions to refer to: "
                f'@MCPScorerFactory.register_scorer("{getattr(name, "__name__", "NAME")}")'
            )

        def register(function: _Function) -> _Function:
            extras = _extras(name, function)
            if "rollout" in extras and traits.get("sees_group"):
                raise ConfigError(f"scorer {name!r}: a group has no single `rollout`; leave it out")
            cls._scorers[name] = Scorer(name, function, extras, source=cls._source, **traits)
            return function

        return register if function is None else register(function)

    @classmethod
    def get_scorer(cls, name: str) -> Scorer:
        """Return the scorer of that name, or the weighted sum of scorers that it describes.

        A sum is written `gaia + 0.3*similarity`. Each scorer is a part of the score.

        Raises:
            ConfigError: there is none (the known ones are listed), or the package that provides it
                fails on import.
        """
        if name not in cls._scorers:
            cls._load_installed(name)
        if name in cls._scorers:
            return cls._scorers[name]
        terms = weighted_terms(name)
        if terms:
            return _weighted_sum(name, [(weight, cls.get_scorer(part)) for weight, part in terms])
        near = get_close_matches(name.lower(), cls.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown scorer {name!r}{hint} (known: {', '.join(cls.names())})")

    @classmethod
    def check_question(cls, name: str, answers: Sequence[Any]) -> None:
        """Refuse a question that its scorer cannot score.

        Args:
            name: the scorer's.
            answers: the question's right answers.

        Raises:
            ConfigError: the scorer does not exist, requires a reference answer, compares text
                although an answer is a list or an object, or cannot use an answer.
        """
        scorer = cls.get_scorer(name)
        if scorer.needs_answer and not answers:
            raise ConfigError(
                f"scorer {name!r} needs a reference answer, and the question has none"
            )
        for answer in answers if scorer.compares_text else ():
            if isinstance(answer, list | dict):
                kind = "a list" if isinstance(answer, list) else "an object"
                raise ConfigError(
                    f"scorer {name!r} compares text, and an answer is {kind}; list alternative "
                    "answers in aug_answers, or use your own scorer (--scorer_module)"
                )
        if scorer.check_answer is not None:
            for problem in filter(None, map(scorer.check_answer, answers)):
                raise ConfigError(f"scorer {name!r}: {problem}")

    @classmethod
    def registered_functions(cls) -> list[ScoringFunction]:
        """Return the functions of all scorers that were registered so far."""
        return [scorer.function for scorer in cls._scorers.values()]

    @classmethod
    def names(cls) -> list[str]:
        """Return all known names, sorted."""
        return sorted({*cls._scorers, *entry_points(group=ENTRY_POINTS).names})

    @classmethod
    @contextmanager
    def loading(cls, source: str) -> Iterator[None]:
        """Record the origin of all scorers that are registered inside the block."""
        former, cls._source = cls._source, source
        try:
            yield
        finally:
            cls._source = former

    @classmethod
    def _load_installed(cls, name: str) -> None:
        """Register the scoring function that an installed package provides under this name."""
        installed = entry_points(group=ENTRY_POINTS)
        if name not in installed.names:
            return
        try:
            with cls.loading(installed[name].module):
                function = installed[name].load()
                # Its module may have registered it with the decorator, including a version.
                if name not in cls._scorers:
                    cls.register_scorer(name, function)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"scorer {name!r}: {type(error).__name__}: {error}") from error


def weighted_terms(name: str) -> list[tuple[float, str]]:
    """Return the weights and names that a name sums; nothing if it is no sum."""
    matches = [_TERM.fullmatch(text) for text in name.split("+")]
    terms = [(float(match[1] or 1), match[2]) for match in matches if match is not None]
    is_sum = len(terms) == len(matches) and ("+" in name or "*" in name)
    return terms if is_sum else []


def _weighted_sum(name: str, terms: Sequence[tuple[float, Scorer]]) -> Scorer:
    scorers = [scorer for _, scorer in terms]
    for scorer in scorers:
        if scorer.sees_group or scorers.count(scorer) > 1:
            problem = "scores groups" if scorer.sees_group else "occurs twice"
            raise ConfigError(f"scorer {name!r}: {scorer.name!r} {problem}; leave it out")

    async def weighted_sum(
        answer: str | None,
        truth: GroundTruth,
        config: AgentConfig | None,
        rollout: Rollout | None = None,
    ) -> Verdict:
        total = Verdict(0.0)
        # One after the other: if the first cannot decide, no judge is asked in vain.
        for weight, scorer in terms:
            score = await scorer.score(answer, truth, config, rollout=rollout)
            parts = {f"{scorer.name} {part}": value for part, value in score.parts.items()}
            total = Verdict(
                total.value + weight * score.value,
                detail="\n".join(filter(None, (total.detail, score.detail))),
                inputs=total.inputs | score.inputs,
                parts=total.parts | {scorer.name: score.value} | parts,
            )
        return total

    return Scorer(
        name,
        weighted_sum,
        ("config", "rollout") if any(scorer.takes_rollout for scorer in scorers) else ("config",),
        version=", ".join(scorer.version for scorer in scorers),
        needs_judge=any(scorer.needs_judge for scorer in scorers),
        needs_answer=any(scorer.needs_answer for scorer in scorers),
        compares_text=any(scorer.compares_text for scorer in scorers),
    )


def _extras(name: str, function: ScoringFunction) -> tuple[Extra, ...]:
    """Return what a function takes after answer and truth, in its order."""
    if not callable(function):
        raise ConfigError(f"scorer {name!r}: {function!r} is not a function")
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return ("config",)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    known: dict[str, Extra] = {"rollout": "rollout", "config": "config", "agent_config": "config"}
    extras = []
    for parameter in positional[2:]:
        extra = known.get(parameter.name)
        if extra is not None:
            extras.append(extra)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"scorer {name!r}: nothing is passed as {parameter.name!r}; after (answer, truth), a "
                "scoring function may take `rollout` (the conversation, its calls and the tools) and "
                "`agent_config`"
            )
        else:
            break  # the user's own, such as `tolerance=0.1`
    if len(positional) < 2:
        raise ConfigError(
            f"scorer {name!r}: a scoring function must take (answer, truth), and may take `rollout` "
            "and `agent_config`; with sees_group, it takes the records instead of the answer"
        )
    return tuple(extras)


def load_scorer_module(source: str | Path) -> ModuleType:
    """Import a Python file (or a module by its dotted name) that registers scorers; return it.

    Raises:
        ConfigError: it is missing or fails on import.
    """
    origin = str(Path(source).resolve()) if Path(source).suffix == ".py" else str(source)
    with MCPScorerFactory.loading(origin):
        return load_user_module(source, f"scorer module {source}")


async def end_scorer_processes() -> None:
    """Stop the processes of scoring functions; the next scoring starts a new one."""
    await asyncio.gather(*(asyncio.to_thread(one.close) for one in _processes.values()))
