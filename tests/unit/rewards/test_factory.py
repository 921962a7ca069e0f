import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import ConfigError, ScorerDefect, ScorerTimeout, ScoringError
from agentrl.rewards import (
    AgentConfig,
    GroundTruth,
    MCPScorerFactory,
    Scorer,
    Verdict,
    load_scorer_module,
    scorer_threads,
)
from agentrl.rewards.scorer_threads import ScorerThreads
from agentrl.schema import MCPTask, Record

TRUTH = GroundTruth(query="q", answer="abc")


@pytest.fixture(autouse=True)
def _same_scorers_afterwards() -> Iterator[None]:
    before = dict(MCPScorerFactory._scorers)
    yield
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


async def test_plain_and_async_functions_of_two_and_three_arguments_are_scorers() -> None:
    config = AgentConfig(path="a.yml")

    @MCPScorerFactory.register_scorer("plain", version="7")
    def plain(answer: str, truth: GroundTruth) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return len(answer) / len(truth.answer)

    @MCPScorerFactory.register_scorer("configured")
    async def configured(answer: str, truth: GroundTruth, config: AgentConfig | None) -> Verdict:
        await asyncio.sleep(0)
        assert config is not None
        return Verdict(1.0, detail=config.path, inputs={"k": 1})

    half: Any = np.float32(0.5)
    MCPScorerFactory.register_scorer("numpy", lambda answer, truth: half)

    score = await MCPScorerFactory.get_scorer("plain").score("ab", TRUTH, config)
    assert (score.scorer, score.version) == ("plain", "7")
    assert score.value == pytest.approx(2 / 3)
    assert score.inputs == {"answer": "ab", "reference": "abc", "aug_answers": []}
    score = await MCPScorerFactory.get_scorer("configured").score("ab", TRUTH, config)
    assert (score.value, score.detail, score.inputs["k"]) == (1.0, "a.yml", 1)
    assert (await MCPScorerFactory.get_scorer("numpy").score("ab", TRUTH)).value == 0.5


async def test_a_third_argument_with_a_default_is_the_scorer_s_own() -> None:
    config = AgentConfig(path="a.yml")

    def near(answer: str, truth: GroundTruth, tolerance: float = 0.5) -> float:
        return tolerance

    def judged(answer: str, truth: GroundTruth, config: AgentConfig | None = None) -> float:
        return float(config is not None)

    MCPScorerFactory.register_scorer("near", near)
    MCPScorerFactory.register_scorer("judged", judged)
    assert (await MCPScorerFactory.get_scorer("near").score("x", TRUTH, config)).value == 0.5
    assert (await MCPScorerFactory.get_scorer("judged").score("x", TRUTH, config)).value == 1.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda answer, truth: 1 / 0, "failed: ZeroDivisionError"),
        (lambda answer, truth: "1", "returned str, not a number"),
        (lambda answer, truth: float("nan"), "returned nan"),
        (lambda answer, truth: None, "returned NoneType"),
        (lambda answer, truth: np.array([0.5, 1.0]), "returned ndarray, not a number"),
        (lambda answer, truth: next(iter(())), "RuntimeError: StopIteration"),
        (lambda answer, truth: sys.exit(3), r"exited the program \(3\) instead of returning"),
    ],
)
async def test_a_scorer_that_fails_gives_no_score(function: Any, reason: str) -> None:
    MCPScorerFactory.register_scorer("bad", function)
    with pytest.raises(ScoringError, match=reason):
        await MCPScorerFactory.get_scorer("bad").score("x", TRUTH)


TRIES = [
    Record(id=f"t/{n}", task_id="t", split="train", traj_id=n, order=0, final_answer=answer)
    for n, answer in enumerate(("a", None, "bb"))
]


async def test_a_scorer_that_sees_the_group_gives_every_try_its_own_score() -> None:
    @MCPScorerFactory.register_scorer("longest", version="2", sees_group=True)
    async def longest(records: Sequence[Record], truth: GroundTruth) -> list[Any]:
        lengths = [len(record.final_answer or "") for record in records]
        return [Verdict(size / max(lengths), parts={"length": size}) for size in lengths]

    scorer = MCPScorerFactory.get_scorer("longest")
    scores = await scorer.score_group(TRIES, TRUTH)
    assert [score.value for score in scores] == [0.5, 0.0, 1.0]
    assert [score.parts for score in scores] == [{"length": 1}, {"length": 0}, {"length": 2}]
    assert [score.inputs["answer"] for score in scores] == ["a", None, "bb"]
    assert {(score.scorer, score.version) for score in scores} == {("longest", "2")}
    with pytest.raises(
        ConfigError, match=("scores all rollouts of a question together; this is a single one")
    ):
        await scorer.score("a", TRUTH)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda records, truth: [1.0], "returned 1 for 3 records"),
        (lambda records, truth: 1.0, "returned a float for 3 records"),
        (lambda records, truth: "abc", "returned a str for 3 records"),
        (lambda records, truth: repeat(1.0), "returned 4 for 3 records"),
        (lambda records, truth: (1 / one for one in (1, 0, 1)), "failed: ZeroDivisionError"),
        (lambda records, truth: [0.0, 1.0, None], "returned NoneType, not a number"),
        (lambda records, truth: [Verdict(1, parts={"p": float("nan")})] * 3, "p returned nan"),
        (lambda records, truth: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
async def test_a_group_whose_scorer_fails_has_no_score(function: Any, reason: str) -> None:
    MCPScorerFactory.register_scorer("bad", function, sees_group=True)
    with pytest.raises(ScorerDefect, match=reason):
        await MCPScorerFactory.get_scorer("bad").score_group(TRIES, TRUTH)


async def test_a_group_is_not_judged_on_the_event_loop_by_what_yields_its_scores() -> None:
    def slowly(records: Sequence[Record], truth: GroundTruth) -> Iterator[float]:
        assert threading.current_thread() is not threading.main_thread()
        yield from (0.0, 0.5, 1.0)

    MCPScorerFactory.register_scorer("slowly", slowly, sees_group=True)
    scores = await MCPScorerFactory.get_scorer("slowly").score_group(TRIES, TRUTH)
    assert [score.value for score in scores] == [0.0, 0.5, 1.0]


async def test_functions_that_hang_are_given_up_and_the_next_have_their_places() -> None:
    threads, ended = ScorerThreads(2), threading.Event()
    calls = [threads.run("scorer 'x'", 0.2, ended.wait) for _ in range(4)]
    hung = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in hung} == {ScorerTimeout}
    assert all("scorer 'x' returned no score within 0.2 s" in str(error) for error in hung)
    assert await threads.run("scorer 'y'", 30, lambda: 7) == 7
    ended.set()


async def test_the_log_says_where_a_function_is_that_takes_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_threads, "LONG_SECONDS", 0.1)
    ended = threading.Event()

    def waits() -> int:
        ended.wait()
        return 7

    call = asyncio.create_task(ScorerThreads(1).run("scorer 'x'", 30, waits))
    while not caplog.records:
        await asyncio.sleep(0.01)
    ended.set()
    assert await call == 7
    (line,) = caplog.messages
    assert re.fullmatch(
        r"scorer 'x' is slow: running for 0 s, now at \S*test_factory\.py:\d+", line
    )


async def test_a_function_whose_caller_is_gone_is_not_begun() -> None:
    threads, ended, begun = ScorerThreads(1), threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run("a", 30, ended.wait))
    second = asyncio.create_task(threads.run("b", 30, begun.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    ended.set()
    await first
    assert await threads.run("c", 30, begun.is_set) is False


@pytest.mark.parametrize(
    "function", [lambda answer: 1.0, lambda a, b, c, d: 1.0, lambda: 1.0], ids=["1", "4", "0"]
)
def test_functions_of_other_arity_are_refused_at_registration(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"after \(answer, truth\)|must take \(answer, truth\)"):
        MCPScorerFactory.register_scorer("bad", function)


def test_unknown_names_list_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown scorer 'EM'; did you mean 'em'"):
        MCPScorerFactory.get_scorer("EM")
    with pytest.raises(ConfigError, match=r"'exat'; did you mean 'exact'\? \(known: agentcpm, as"):
        MCPScorerFactory.get_scorer("exat")


async def test_a_file_registers_its_scorers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from agentrl.rewards import MCPScorerFactory\n"
        "MCPScorerFactory.register_scorer('mine', lambda answer, truth: 0.25)\n"
    )
    load_scorer_module(path)
    assert (await MCPScorerFactory.get_scorer("mine").score("x", TRUTH)).value == 0.25


def test_files_that_cannot_be_imported_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.py: no such file"):
        load_scorer_module(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match="scorer module no_such_module_of_ours: ModuleNotFound"):
        load_scorer_module("no_such_module_of_ours")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"broken\.py: ZeroDivisionError"):
        load_scorer_module(broken)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a package on the path that brings scorers by entry points."""

    def write(code: str, **entries: str) -> None:
        (tmp_path / "their_scorers.py").write_text(code)
        info = tmp_path / "their_scorers-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-scorers\nVersion: 1.0\n")
        lines = [f"{name} = {place}\n" for name, place in entries.items()]
        (info / "entry_points.txt").write_text("[agentrl.scorers]\n" + "".join(lines))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "their_scorers", raising=False)

    return write


async def test_an_installed_package_brings_scorers_by_entry_points(
    install: Callable[..., None],
) -> None:
    install(
        "from agentrl.rewards import MCPScorerFactory\n"
        "def half(answer, truth): return 0.5\n"
        "@MCPScorerFactory.register_scorer('versioned', version='7')\n"
        "async def versioned(answer, truth, config): return 0.75\n",
        half="their_scorers:half",
        versioned="their_scorers:versioned",
    )
    assert {"half", "versioned"} <= set(MCPScorerFactory.names())
    assert (await MCPScorerFactory.get_scorer("half").score("x", TRUTH)).value == 0.5
    score = await MCPScorerFactory.get_scorer("versioned").score("x", TRUTH)
    assert (score.value, score.version) == (0.75, "7")


def test_an_entry_point_that_is_no_scorer_is_named(install: Callable[..., None]) -> None:
    install(
        "number = 3\ndef one(answer): return 1.0\n",
        number="their_scorers:number",
        one="their_scorers:one",
        gone="their_scorers:gone",
    )
    for name, problem in (
        ("number", "'number': 3 is not a function"),
        ("one", r"'one': a scoring function must take \(answer, truth\)"),
        ("gone", "'gone': AttributeError"),
    ):
        with pytest.raises(ConfigError, match=problem):
            MCPScorerFactory.get_scorer(name)


def test_the_truth_of_a_task_keeps_zero_and_false() -> None:
    task = MCPTask(id="t", query="q", answer=0, aug_answers=(False,))
    assert GroundTruth.of(task).accepted == ("0", "false")
    assert GroundTruth(query="q").accepted == ()


async def test_a_scorer_of_the_originals_form_reads_the_answer_by_its_name() -> None:
    async def by_name(model_answer: str, ground_truth: dict[str, str]) -> float:
        return 1.0 if model_answer == ground_truth["answer"] else 0.0

    scorer = Scorer("by_name", by_name, extras=())
    assert [(await scorer.score(answer, TRUTH)).value for answer in ("abc", "x")] == [1.0, 0.0]
    with pytest.raises(KeyError, match=r"'answers' \(a truth has query, answer, aug_answers, "):
        TRUTH["answers"]
    assert str(TRUTH) == "abc"
    assert str(GroundTruth(query="q", answer=2.0)) == "2"


async def test_a_scorer_may_read_the_truth_as_any_mapping() -> None:
    async def by_get(model_answer: str, ground_truth: dict[str, Any]) -> float:
        right = {ground_truth.get("answer"), *ground_truth.get("aug_answer", ())}
        return float(model_answer in right)

    truth = GroundTruth(query="q", answer="abc", aug_answers=("ABC",))
    scorer = Scorer("by_get", by_get, extras=())
    values = [(await scorer.score(answer, truth)).value for answer in ("abc", "ABC", "x")]
    assert values == [1.0, 1.0, 0.0]
    assert dict(truth) == {"query": "q", "answer": "abc", "aug_answers": ("ABC",), "columns": {}}
    assert truth.get("answers", "none") == "none"
    assert GroundTruth.model_validate_json(truth.model_dump_json()) == truth


@pytest.mark.parametrize(
    "compare",
    [
        lambda answer, truth: float(answer == truth),
        lambda answer, truth: float(truth != answer),
        lambda answer, truth: float(answer in truth),
        lambda answer, truth: float(truth in [answer]),
    ],
)
async def test_a_scorer_that_compares_the_whole_truth_is_told(compare: Any) -> None:
    scorer = Scorer("whole", compare, extras=())
    with pytest.raises(ScorerDefect, match=r"compare the answer with truth\.answer"):
        await scorer.score("abc", TRUTH)
    assert GroundTruth(query="q", answer="abc") == TRUTH
