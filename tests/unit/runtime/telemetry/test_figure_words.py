"""The table of figures names everything that a run writes, in words."""

import re
from dataclasses import astuple

import pytest

from agentrl.evaluation.eval_scores import EvalMetrics, TaskScores, score_row
from agentrl.plugins.inspector.curve_answers import CURVES, SPREADS
from agentrl.plugins.inspector.inspector_app import PAGES
from agentrl.rollout.worker.attempt import SlotCounts
from agentrl.rollout.worker.sampler_process import sampler_metrics
from agentrl.rollout.worker.sampling_loop import LoopState
from agentrl.runtime.telemetry.figure_words import (
    EVAL_FIGURES,
    QUEUE_FIGURES,
    SAMPLER_FIGURES,
    STEP_FIGURES,
    TABLES,
    TRAINER_TOTALS,
)
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.trackers import trainer_metrics

PAGE_SOURCES = PAGES.parent / "web/src/pages"
STEP = StepMetrics(
    step=1, num_groups=1, num_records=1, num_trained_records=1, learning_rate=1e-6
).model_copy(update={name: 1.0 for name in StepMetrics.model_fields if name != "step"})


def test_every_field_of_a_step_has_words_and_no_others() -> None:
    assert set(STEP_FIGURES) == set(StepMetrics.model_fields)


def test_every_figure_of_an_evaluation_has_words() -> None:
    row = score_row([TaskScores([1.0, 0.0])])
    evaluation = EvalMetrics(version=1, reward_mean=0.5, num_tasks=1, total=row)
    assert set(evaluation.figures()) | set(EvalMetrics.model_fields) <= set(EVAL_FIGURES)


def test_every_metric_of_a_sampler_has_words_and_no_others() -> None:
    written = {metric.name for metric in sampler_metrics(LoopState(0, 0, 0, SlotCounts(), {}))}
    assert {f"agentrl_sampler_{name}" for name in SAMPLER_FIGURES} == written


def test_every_metric_of_the_trainer_has_words() -> None:
    history = History(
        steps=[STEP.model_copy(update={"masked_tokens": {}, "dropped": {}, "staleness": {}})],
        evals=[EvalMetrics(version=1, reward_mean=0.5, num_tasks=1)],
    )
    written = {metric.name.removeprefix("agentrl_trainer_") for metric in trainer_metrics(history)}
    known = {*TRAINER_TOTALS, *STEP_FIGURES, *(f"eval_{name}" for name in EVAL_FIGURES)}
    assert set(TRAINER_TOTALS) <= written <= known


def test_every_figure_of_the_pages_has_words() -> None:
    assert {*CURVES, *SPREADS} <= set(STEP_FIGURES)
    source = (PAGE_SOURCES / "step.tsx").read_text()
    lists = re.findall(r"const (?:FIGURES|MERGING) = \[(.*?)\]", source, re.S)
    shown = {name for names in lists for name in re.findall(r'"(\w+)"', names)}
    for page in ("run", "compare"):
        text = (PAGE_SOURCES / f"{page}.tsx").read_text()
        (names,) = re.findall(r"const SHOWN = \[(.*?)\]", text, re.S)
        shown |= set(re.findall(r'"(\w+)"', names))
    assert len(shown) > 25
    assert shown <= set(STEP_FIGURES)
    asked = re.findall(r'queue\("(\w+)"', (PAGE_SOURCES / "run.tsx").read_text())
    assert set(asked) == set(QUEUE_FIGURES)


@pytest.mark.parametrize("table", TABLES)
def test_names_are_words_and_unique(table: str) -> None:
    figures = TABLES[table]
    for key, figure in figures.items():
        assert all(astuple(figure)), key
        assert "_" not in figure.name, key
        for sentence in (figure.meaning, figure.advice):
            assert sentence.endswith("."), key
            assert sentence[0] in "`01" or sentence[0].isupper(), key
    assert len({figure.name for figure in figures.values()}) == len(figures)
