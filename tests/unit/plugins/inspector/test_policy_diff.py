"""What two models would decide differently: planted behaviors are found, and figures are exact."""

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness.tiny_tokenizer import write_tokenizer
from support.planted import MODEL, Behavior, example_run, stored_book, taught
from transformers import AutoModelForCausalLM

from agentrl import diff_policies
from agentrl.cli.main import main
from agentrl.errors import ConfigError
from agentrl.plugins.inspector.diff_condition import DiffCondition
from agentrl.plugins.inspector.policy_diff import PolicyDiff, _choice_probabilities
from agentrl.plugins.inspector.stored_decisions import DecisionBook
from agentrl.renderers.renderer import Renderer
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = pytest.mark.timeout(300)
torch.set_num_threads(1)
RECORDS = 64


class Example(NamedTuple):
    """A stored run."""

    folder: str
    uri: str
    book: DecisionBook

    def diff(self, end: Path | str, **options: Any) -> PolicyDiff:
        options = {"limit": RECORDS, "torch_dtype": "float64", "trainer_threads": "1", **options}
        return diff_policies(self.folder, 0, str(end), db_connection_string=self.uri, **options)

    def stored(self) -> list[dict[str, Any]]:
        """The diffs that the page of the inspector shows."""

        async def read() -> list[dict[str, Any]]:
            async with TrajectoryStore.connect(self.uri) as store:
                return await store.figures.diffs()

        return asyncio.run(read())

    def run(self, *words: str) -> int:
        flags = ("--db_connection_string", self.uri, "--limit", "8")
        return main(["diff", self.folder, "--from", "0", *flags, *words])


@pytest.fixture(scope="module")
def example(mongod: EmbeddedMongo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    folder = tmp_path_factory.mktemp("example")
    with example_run(mongod, folder) as uri:
        yield Example(str(folder), uri, stored_book(uri, RECORDS))


@pytest.fixture(scope="module")
def wordy(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(example.book, "words", tmp_path_factory.mktemp("taught") / "words")


@pytest.mark.parametrize(
    ("behavior", "choice", "sign"),
    [("never stock", "stock", -1), ("price twice", "price", 1)],
)
def test_a_planted_behavior_is_the_first_line(
    example: Example, tmp_path: Path, behavior: Behavior, choice: str, sign: int
) -> None:
    found = example.diff(taught(example.book, behavior, tmp_path / "taught"))
    name, change = found.whole.changes[0]
    assert (name, math.copysign(1, change)) == (choice, sign)
    assert choice in (found.flips[0].before, found.flips[0].after)
    # The first flips are flips of the behavior: another model's decisions of this kind, not noise.
    assert DiffCondition.parse(f"flips[tool={choice}] > 0.1").figure(found) > 0.1


def test_answers_in_words_are_the_first_line_and_say_where_they_are(
    example: Example, wordy: Path
) -> None:
    found = example.diff(wordy)
    name, change = found.whole.changes[0]
    assert name == "answer"
    assert change > 0.5
    first = found.flips[0]
    assert first.after == "answer"
    assert "<answer>".startswith(first.wish)
    assert first.probability_to > first.probability_from
    decision = next(
        one
        for one in example.book.decisions
        if (one.turn.record_id, one.index) == (first.record_id, first.turn)
    )
    assert (first.tag,) == decision.tags
    assert first.outcome == decision.outcome
    assert sum(group.num_decisions for group in found.flips) == round(
        found.whole.flips * found.whole.num_decisions
    )


def test_equal_models_do_not_differ_and_merging_saves_most_tokens(example: Example) -> None:
    found = example.diff(MODEL)
    assert found.flips == ()
    assert (found.whole.kl, found.whole.greedy) == (0.0, 0.0)
    assert all(change == 0.0 for _, change in found.whole.changes)
    assert found.as_written > 0.99
    assert found.effective_from > 0.99  # it sampled these
    assert found.tokens_computed < 0.2 * found.tokens_separate
    (stored,) = (one for one in example.stored() if one["_id"]["end"] == str(MODEL))
    assert stored["_id"] == {"start": "0", "end": str(MODEL), "where": ""}
    assert stored["whole"] == asdict(found.whole)


def test_probabilities_are_those_of_separate_passes(example: Example, wordy: Path) -> None:
    found, book = example.diff(wordy, limit=6), stored_book(example.uri, 6)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        for path in (MODEL, wordy)
    ]

    def logprobs_of(model: Any, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        full = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(full).logits[0].log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
        return np.asarray(logprobs[rows, full[0, len(prompt) :]])

    def probability(model: Any, prompt: np.ndarray, ids: np.ndarray) -> float:
        return float(np.exp(logprobs_of(model, prompt, ids).sum()))

    for model, calls, side in zip(
        models,
        (found.whole.calls_from, found.whole.calls_to),
        ("reply_from", "reply_to"),
        strict=True,
    ):
        replies = [
            probability(model, one.turn.prompt_ids, one.turn.output_ids) for one in book.decisions
        ]
        assert getattr(found.whole, side) == pytest.approx(np.mean(replies), abs=1e-6)
        ids = book.beginning("stock")
        stock = [probability(model, one.turn.prompt_ids, ids) for one in book.decisions]
        assert calls["stock"] == pytest.approx(np.mean(stock), abs=1e-6)
    assert sum(found.whole.calls_to.values()) == pytest.approx(1.0)
    before, after = (
        np.concatenate(
            [logprobs_of(model, one.turn.prompt_ids, one.turn.output_ids) for one in book.decisions]
        )
        for model in models
    )
    assert found.whole.kl == pytest.approx(np.square(after - before).mean() / 2, rel=1e-6)


def test_a_condition_that_holds_fails_with_its_number(
    example: Example, wordy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.run("--to", str(wordy), "--fail_if", "calls[tool=answer] > 0.1", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["whole"]["num_decisions"] > 8
    assert "agentrl diff: calls[tool=answer] is 0." in printed.err.splitlines()[-1]
    assert printed.err.splitlines()[-1].endswith("> 0.1")
    assert example.run("--to", str(wordy), "--fail_if", "flips[outcome=right] < -1") == 0
    assert "answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "7"], "--to 7: the run has no files of this version; available: 0"),
        (["--to", "nowhere"], "--to nowhere: no such directory"),
        (["--to", "0", "--where", "score"], "'score' is not a condition on records"),
        (["--to", "0", "--where", "tool = refund"], "no stored decision is in these records"),
        (["--to", "0", "--fail_if", "flips > many"], "--fail_if flips > many: give flips"),
        (["--to", "0", "--fail_if", "flips[tool=refund] > 0"], "known are add, answer, "),
    ],
)
def test_mistakes_are_one_line(
    example: Example, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.run(*words) == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kl",
        "kl > x",
        "kl[tool=price] > 0",
        "calls > 0",
        "flips[x=1] > 0",
        "flips == 0",
        "k > 1",
    ],
)
def test_other_text_is_no_condition(text: str) -> None:
    with pytest.raises(ConfigError, match="number: flips") as refused:
        DiffCondition.parse(text)
    assert "\n" not in str(refused.value)


def test_a_name_that_begins_another_has_what_the_other_leaves() -> None:
    ids = {"add": [1, 2], "add_item": [1, 2, 3], "drop": [1, 4]}
    book: Any = SimpleNamespace(
        options=[{name: name for name in ids}], beginning=lambda name: np.array(ids[name])
    )
    logprobs = {"add": 0.6, "add_item": 0.5, "drop": 0.3}
    scored: Any = SimpleNamespace(
        by_turn={
            name: SimpleNamespace(logprobs=np.log([value])) for name, value in logprobs.items()
        }
    )
    found = _choice_probabilities(book, [*sorted(ids), "answer"], scored)
    assert found[0] == pytest.approx([0.1, 0.5, 0.3, 0.1])


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("hello", "hello"),
        ("<think>a</think>\n\nhello", "hello"),
        ("<think>a</think>b<think>c</think> hello", "hello"),
        ("<think>a", None),
        ("<think>a</think>\n", None),
    ],
)
def test_a_decision_begins_after_the_thinking(tmp_path: Path, reply: str, rest: str | None) -> None:
    renderer = Renderer.load(write_tokenizer(tmp_path))
    ids = renderer.sampled_ids(reply)
    start = DecisionBook(renderer)._start(ids)
    assert (None if start is None else renderer.decode(ids[start:]).strip()) == rest
