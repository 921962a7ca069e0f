"""What the console shows of a run, at the sizes of terminals that people have."""

from typing import Any

import pytest
from rich.console import Console

from agentrl.launcher.console.run_panel import RunView, panel, phase_text, standing_lines
from agentrl.schema import RunPhase
from agentrl.store import RunProgress
from agentrl.store.views.answer_figures import AnswerFigures
from agentrl.store.views.learning_signal import MissingScores
from agentrl.store.views.reports import EvaluationStanding
from agentrl.store.views.sampling_progress import RunningRollout, SamplingProgress
from agentrl.store.views.untaught_records import UntaughtRecords


def step(number: int, reward: float | None = 0.5) -> dict[str, Any]:
    """A line of metrics.jsonl; steps take six seconds."""
    return {
        "step": number,
        "reward_mean": reward,
        "loss": 0.01,
        "num_groups": 8,
        "num_trained_tokens": 4000,
        "staleness": {"0": 20, "1": 12},
        "seconds": {"wait_samples": 4.0, "forward": 1.5, "publish": 0.25},
        "time": 1000.0 + 6 * number,
    }


def view(**changes: Any) -> RunView:
    progress = RunProgress(
        policy_version=10,
        phase="sampling",
        groups_per_step=4,
        admitted_groups=48,
        num_groups_ready=3,
        num_groups_consumed=5,
        records={"running": 12, "finished": 2, "scored": 418},
    )
    values: dict[str, Any] = {
        "run_name": "demo",
        "max_steps": 50,
        "phase": "sampling",
        "phase_seconds": 12.0,
        "steps": [step(number) for number in range(1, 11)],
        "progress": progress,
    }
    return RunView(**{**values, **changes})


def drawn(shown: RunView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, legacy_windows=False)
    with console.capture() as captured:
        console.print(panel(shown))
    return captured.get().splitlines()


def test_it_says_which_teacher_the_run_waits_for() -> None:
    progress = view().progress
    assert progress is not None
    waiting = UntaughtRecords(run_name="demo", teacher="big", num_records=4, process="node-b:7:1-a")
    shown = view(progress=progress.model_copy(update={"untaught": (waiting,)}))
    assert "no logprobs of teacher big yet for 4 records: its process " in standing_lines(shown)[0]
    shown.phase = "training"
    assert "teacher" not in standing_lines(shown)[0]


def test_it_says_why_no_server_is_in_service() -> None:
    progress = view().progress
    assert progress is not None
    shown = view(progress=progress.model_copy(update={"server_problem": "no answer within 10 s"}))
    assert "no server is in service: no answer within 10 s" in standing_lines(shown)[0]


def test_it_shows_where_the_run_is_how_fast_it_is_and_what_is_left() -> None:
    text = "\n".join(
        drawn(
            view(
                evaluations=[
                    EvaluationStanding(version=0, num_tasks=70, num_completed=70, mean_score=0.457)
                ]
            )
        )
    )
    for part in (
        "demo",
        "sampling: 3 of 4 groups ready  12 s",
        "step 10/50",
        "6.0 s a step, 4 min left",
        "0.500, mean of the last 5 steps 0.500",
        "0.457 at version 0",
        "waited 4.0 s, trained 1.5 s, published 0.2 s; staleness 0.38",
        "12 running, 2 waiting for a score, 418 scored",
    ):
        assert part in text
    assert "attention" not in text


PHASES: list[tuple[RunPhase, str]] = [
    ("starting", "starting the processes"),
    ("loading", "loading the model"),
    ("evaluating", "evaluating version 0: 37 of 70 questions"),
    ("sampling", "sampling: 3 of 4 groups ready"),
    ("training", "training step 11"),
    ("publishing", "publishing version 11"),
]


@pytest.mark.parametrize(("phase", "words"), PHASES)
def test_every_phase_has_its_words(phase: RunPhase, words: str) -> None:
    under_way = EvaluationStanding(version=0, num_tasks=70, num_completed=37, mean_score=0.4)
    shown = view(phase=phase, evaluations=[under_way])
    assert phase_text(shown) == words
    assert any(words in line for line in drawn(shown))


def test_trouble_is_on_the_panel_for_as_long_as_it_lasts() -> None:
    shown = view(
        steps=[],
        missing=MissingScores(num_unscorable=2, num_waiting=1, num_failed=3),
        lacks_signal=True,
        restarts={"sampler_0": 2},
    )
    said = [
        "no learning signal yet in 5 groups: equal scores",
        "no score for 2 records: the scorer fails",
        "no score yet for 1 record: retrying",
        "3 records failed",
        "restarts: sampler_0 2",
    ]
    text = " ".join(" ".join(drawn(shown)).replace("│", "").split())
    assert "; ".join(said) in text
    line = standing_lines(shown)[0]
    assert line.startswith("   0 s  sampling for 12 s: 3 of 4 groups ready, 12 running")
    assert all(one in line for one in said)


ANSWERS = AnswerFigures(
    num_answers=64,
    mean_score=0.125,
    num_above_0=8,
    num_without_answer=16,
    num_cut=32,
    median_tokens=180,
    longest_tokens=256,
)


def waiting(num_ready: int, *, scored: int, dropped: int = 0, seconds: float = 60.0) -> RunView:
    """A run before its first step, which needs 4 groups of 8 rollouts."""
    progress = RunProgress(
        policy_version=0,
        phase="sampling",
        groups_per_step=4,
        admitted_groups=8,
        num_groups_ready=num_ready,
        records={"running": 24, "scored": scored},
    )
    sampling = SamplingProgress(
        recent=ANSWERS,
        longest=RunningRollout(
            record_id="train/0/q3/5", seconds=94.0, num_turns=2, num_output_tokens=310
        ),
        num_dropped=dropped,
    )
    return view(
        steps=[],
        progress=progress,
        sampling=sampling,
        phase_seconds=seconds,
        num_generations=8,
        max_new_tokens=256,
        tokens_per_second=70.0,
    )


def test_before_the_first_step_it_shows_what_is_sampled_and_when_the_step_is_due() -> None:
    assert standing_lines(waiting(1, scored=16)) == [
        "   0 s  sampling for 60 s: 1 of 4 groups ready, 24 running, 16 scored, 70 tokens/s, "
        "step 1 in about 60 s",
        "        last 64: reward 0.125, 25 % without an answer; 50 % reached the limit of tokens; "
        "tokens: median 180, longest 256 (--max_new_tokens 256 a reply)",
        "        the longest train/0/q3/5 for 94 s (2 turns, 310 tokens so far)",
    ]
    text = " ".join(" ".join(drawn(waiting(1, scored=16))).replace("│", "").split())
    assert "last 64: reward 0.125, 25 % without an answer; 50 % reached" in text
    assert "the longest train/0/q3/5 for 94 s" in text
    assert "step 1 in about 60 s" in text


@pytest.mark.parametrize(
    ("shown", "due"),
    [
        (waiting(0, scored=0), ""),
        (waiting(0, scored=8), "step 1 in about 3 min"),
        # half of the groups are dropped: twice as many rollouts are needed
        (waiting(2, scored=32, dropped=2), "step 1 in about 60 s"),
        (waiting(0, scored=24, dropped=3), "step 1 has no date: all 3 groups so far were dropped"),
        (waiting(4, scored=32), ""),
        (waiting(0, scored=4), ""),
        (waiting(3, scored=40), ""),
    ],
)
def test_the_date_of_the_first_step_counts_dropped_groups(shown: RunView, due: str) -> None:
    assert shown.first_step_text == due


def test_rollouts_that_are_not_long_are_not_named() -> None:
    shown = waiting(1, scored=16)
    assert shown.sampling.longest is not None
    quick = shown.sampling.longest.model_copy(update={"seconds": 3.0})
    shown.sampling = shown.sampling.model_copy(update={"longest": quick})
    assert not any("longest train" in line for line in standing_lines(shown))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 24), (40, 24)])
def test_the_panel_fits_the_terminal(width: int, height: int) -> None:
    shown = view(
        run_name="a-run-with-a-very-long-name-" * 4,
        steps=[step(number, reward=number / 1000) for number in range(1, 500)],
        max_steps=500,
        missing=MissingScores(num_unscorable=2, num_waiting=1, num_failed=3),
        restarts={f"sampler_{number}": 1 for number in range(4)},
    )
    lines = drawn(shown, width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    assert lines[-1] == ""  # where the terminal writes ^C
    assert any(line.split()[1:4] == ["step", "reward", "loss"] for line in lines) == (height >= 30)


def test_a_name_cannot_steer_the_terminal() -> None:
    assert "\x1b[2J" not in "".join(drawn(view(run_name="\x1b[2Jdemo")))


def test_a_pause_between_two_runs_does_not_count_as_a_slow_step() -> None:
    steps = [step(1), step(2), {**step(3), "time": 9000.0}, {**step(4), "time": 9006.0}]
    assert view(steps=steps).seconds_per_step == 6.0
    assert view(steps=steps[:1]).seconds_per_step is None
