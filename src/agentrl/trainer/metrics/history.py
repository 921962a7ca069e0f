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
    """One optimizer step. Figures without a value are left out of metrics.jsonl."""

    model_config = ConfigDict(frozen=True)

    step: int
    reward_mean: float | None = None
    """Mean score of all scored records in the groups that the step read first, including those
    dropped for equal scores or staleness. None if it read no scored record.
    """
    reward_std: float | None = None
    """Population standard deviation of the same scores."""
    reward_min: float | None = None
    reward_max: float | None = None
    num_groups: int
    """Groups read, including dropped ones and ones trained before."""
    num_records: int
    """Records read for the first time; numbers of tokens and turns count these as well."""
    num_trained_records: int
    loss: float | None = None
    """None if the step was skipped."""
    grad_norm: float | None = None
    learning_rate: float
    clip_fraction: float | None = None
    """Share of the target tokens whose gradient the clip range cut off."""
    clip_fraction_positive: float | None = None
    """The same among those with a positive advantage."""
    clip_fraction_negative: float | None = None
    drop_fraction: float | None = None
    """Share of the target tokens beyond the hard drop range, or masked by a correction."""
    mask_fraction: float | None = None
    """Share of the target tokens that an importance correction masked (they count as dropped, too)."""
    kl: float | None = None
    """Mean KL estimate against the reference model."""
    sampler_kl_k1: float | None = None
    """Estimates of the KL of the trainer's policy from the sampler's, by the three estimators."""
    sampler_kl_k2: float | None = None
    sampler_kl_k3: float | None = None
    entropy: float | None = None
    ratio_mean: float | None = None
    """Mean importance ratio of the target tokens."""
    ratio_max: float | None = None
    ratio_quantiles: dict[str, float] = Field(default_factory=dict)
    """Quantiles `p01`, `p10`, `p50`, `p90` and `p99` of the importance ratios."""
    loss_metrics: dict[str, float] = Field(default_factory=dict)
    """Means over the target tokens of the figures that the user's own loss returned."""
    logprob_gap: float | None = None
    """Mean |policy - behavior| logprob of the target tokens."""
    merge: Merge | None = None
    """Which prefixes the rows shared; releases before 0.3 did not note it."""
    merge_tokens: float | None = None
    """Tokens of separate rows over those that went through the model."""
    merge_rollouts: float | None = None
    """Tokens of separate rows for each rollout over those that went through the model."""
    merge_attention: float | None = None
    """The ratio of `merge_tokens` for (query, key) pairs that see each other."""
    merge_blocks: float | None = None
    """The same ratio for blocks of 128 x 128 pairs that attention visits."""
    tokens_per_second: float | None = None
    """Tokens per second through the model (forward and backward), all ranks together."""
    tflops: float | None = None
    """Model TFLOP/s of one device in forward and backward passes."""
    mfu: float | None = None
    """`tflops` over the device's peak, if that is known or given (`peak_tflops`)."""
    route_conflicts: int = 0
    """Tokens that the servers of several records sent to different experts (`--router_replay`)."""
    merge_error: float | None = None
    """Relative gradient error against separate turns, if the step was verified."""
    skipped: str | None = None
    """Why the optimizer step was skipped, if it was."""
    num_output_tokens: int = 0
    """Sampled tokens in the consumed groups."""
    num_prompt_tokens: int = 0
    """Tokens from outside the model in the consumed groups, each counted once per record."""
    max_output_tokens: int = 0
    """Sampled tokens of the longest record."""
    turns_mean: float | None = None
    """Model calls per record."""
    num_trained_tokens: int = 0
    """Sampled tokens in the loss."""
    masked_tokens: dict[str, int] = Field(default_factory=dict)
    """Sampled tokens that are not in the loss, by reason; including turns left out as a whole."""
    branched_records: dict[str, int] = Field(default_factory=dict)
    """Records of later rounds by the rule that chose their turn; `none` if none could, and the record
    started at the question."""
    branch_reuse: float | None = None
    """Sampled tokens of all records, copies in branches included, over those that were sampled. None
    if no group branches."""
    credit_spread: float | None = None
    """Mean standard deviation of the advantages of a trained record's turns."""
    saved_groups: float | None = None
    """Share of the groups that branch that are trained although their rollouts from the question alone
    have equal scores. None if no group branches."""
    num_forward_tokens: int = 0
    """Tokens that went through the model, after merging."""
    num_flat_tokens: int = 0
    """Tokens that separate rows for each turn would have had."""
    staleness: dict[int, int] = Field(default_factory=dict)
    """Trained records by number of policy versions behind the current one."""
    token_staleness: dict[int, int] = Field(default_factory=dict)
    """Target tokens by number of policy versions behind the current one."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Records not trained, by reason."""
    teacher_wait_seconds: float = 0.0
    """Part of `wait_samples` in which complete groups were at hand and waited for teachers."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time by phase."""
    time: float = 0.0
    """Unix time of the step's end."""


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
    consecutive_skips: int = 0
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
