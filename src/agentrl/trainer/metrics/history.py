"""The history of a run, step by step: the source of `summary.json` and the plot.

It is saved with every checkpoint, so that the curve of a resumed run starts at step 1.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.data.rows import Merge
from agentrl.evaluation.eval_scores import EvalMetrics


class StepMetrics(BaseModel):
    """One optimizer step. Figures without a value are left out of metrics.jsonl.

    What each figure means: `STEP_FIGURES` of `runtime.telemetry.figure_words`.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    reward_mean: float | None = None
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    num_groups: int
    num_records: int
    num_trained_records: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float
    clip_fraction: float | None = None
    clip_fraction_positive: float | None = None
    clip_fraction_negative: float | None = None
    drop_fraction: float | None = None
    mask_fraction: float | None = None
    kl: float | None = None
    sampler_kl_k1: float | None = None
    sampler_kl_k2: float | None = None
    sampler_kl_k3: float | None = None
    entropy: float | None = None
    ratio_mean: float | None = None
    ratio_max: float | None = None
    ratio_quantiles: dict[str, float] = Field(default_factory=dict)
    loss_metrics: dict[str, float] = Field(default_factory=dict)
    logprob_gap: float | None = None
    merge: Merge | None = None
    """Releases before 0.3 did not note it."""
    merge_tokens: float | None = None
    merge_rollouts: float | None = None
    merge_attention: float | None = None
    merge_blocks: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    route_conflicts: int = 0
    merge_error: float | None = None
    skipped: str | None = None
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    max_output_tokens: int = 0
    turns_mean: float | None = None
    num_trained_tokens: int = 0
    masked_tokens: dict[str, int] = Field(default_factory=dict)
    branched_records: dict[str, int] = Field(default_factory=dict)
    branch_reuse: float | None = None
    credit_spread: float | None = None
    saved_groups: float | None = None
    num_forward_tokens: int = 0
    num_flat_tokens: int = 0
    staleness: dict[int, int] = Field(default_factory=dict)
    token_staleness: dict[int, int] = Field(default_factory=dict)
    dropped: dict[str, int] = Field(default_factory=dict)
    teacher_wait_seconds: float = 0.0
    seconds: dict[str, float] = Field(default_factory=dict)
    time: float = 0.0


class History(BaseModel):
    """All figures that a run reports."""

    kind: Literal["rl", "sft"] = "rl"
    """Kind of the run: reinforcement learning or supervised fine-tuning."""

    steps: list[StepMetrics] = Field(default_factory=list)
    evals: list[EvalMetrics] = Field(default_factory=list)
    groups_consumed: int = 0
    """Groups that were trained on or dropped by the steps so far."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time by phase over all processes that worked on this run, `total` included."""
    eval_losses: dict[int, float] = Field(default_factory=dict)
    """Step -> loss on held-out conversations (supervised fine-tuning)."""
    tail_dropped: dict[str, int] = Field(default_factory=dict)
    """Records dropped after the last step, when the data ended, by reason."""

    @property
    def last_step(self) -> int:
        """Optimizer steps done."""
        return self.steps[-1].step if self.steps else 0

    def add_seconds(
        self, phase: str, spent: float, step_seconds: dict[str, float] | None = None
    ) -> None:
        """Account wall time to a phase of the run and, if given, of a step."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        if step_seconds is not None:
            step_seconds[phase] = round(step_seconds.get(phase, 0.0) + spent, 4)

    @contextmanager
    def timed(self, phase: str, step_seconds: dict[str, float] | None = None) -> Iterator[None]:
        """Account the wall time of the block as `add_seconds` does."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(phase, time.monotonic() - started, step_seconds)

    def add_tail(self, dropped: Mapping[str, int]) -> None:
        """Account records that were dropped after the last step."""
        self.tail_dropped = dict(Counter(self.tail_dropped) + Counter(dropped))

    def add_eval(self, evaluation: EvalMetrics) -> None:
        """Add an evaluation; evaluations stay in order of their versions."""
        self.evals = sorted([*self.evals, evaluation], key=lambda metrics: metrics.version)

    def eval_at(self, version: int) -> EvalMetrics | None:
        """Return the evaluation of a version, None if there was none."""
        return next(
            (evaluation for evaluation in self.evals if evaluation.version == version), None
        )

    def dropped(self) -> dict[str, int]:
        """Return the records not trained, by reason, over all steps."""
        total = Counter(self.tail_dropped)
        for step in self.steps:
            total.update(step.dropped)
        return dict(total)

    def staleness(self) -> dict[int, int]:
        """Return the histogram of staleness over all steps."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.staleness)
        return dict(sorted(total.items()))
