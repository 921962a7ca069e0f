"""One rank's model and optimizer: micro-batches in, one optimizer step out.

Independent of the store, the servers, and the origin of the target tokens. The path to the
gradient is `Learner.forward_backward` -> `passes.forward_backward`.
"""

import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from agentrl.config.atomic_file import write_atomically
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.data import MicroBatch
from agentrl.distributed import (
    HostMemory,
    Ranks,
    StateWriter,
    full_state_dict,
    load_sharded_state_dict,
    read_state,
    sharded_state_dict,
    whole_tensors,
)
from agentrl.distributed.broadcast import Bucket, in_buckets
from agentrl.distributed.dtypes import dtype_name
from agentrl.models.checkpoint_export import TEMPLATE_FILE, read_tokenizer_files, save_hf
from agentrl.models.flops import peak_tflops
from agentrl.models.lora import adapter_tensors, has_adapter, save_adapter
from agentrl.trainer.learner.function_trial import problem_of_functions
from agentrl.trainer.learner.merge_check import STEP_TOLERANCE, MergeCheck, check_merge
from agentrl.trainer.learner.optimizer import learning_rate, make_optimizer, move_state
from agentrl.trainer.learner.passes import Passes, PassOutcome, WholePasses
from agentrl.trainer.learner.rank_models import RankModels
from agentrl.trainer.learner.settings import LearnerSettings, export_dtype
from agentrl.trainer.learner.staged_passes import StagedPasses
from agentrl.trainer.learner.target_stats import TargetStats, TargetTrace, TurnRatios, target_stats

_WRAPPER_PREFIX = "model."


@dataclass(frozen=True)
class StepOutcome:
    """The result of an optimizer step; means are over all target tokens of the step."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_targets: int
    targets: TargetStats
    """Ratios, clipping and divergence from the sampler; complete on rank 0 only."""
    trace: TargetTrace
    """Token by token; complete on rank 0 only."""
    flops: float
    """Floating-point operations of all ranks' forward and backward passes, over all updates."""
    peak_tflops: float | None
    """Dense bfloat16 peak of one device in TFLOP/s, if known."""
    entropy: float | None
    """Mean entropy in nats, with `--log_entropy`."""
    mask_fraction: float
    """Share of the target tokens that an importance correction masked."""
    kl: float | None
    """Mean KL estimate against the reference model, if there is one."""
    seconds: dict[str, float]
    """Wall time of `forward_backward` and `optimizer` on this rank, over all updates of the step."""
    loss_metrics: dict[str, float]
    """Means of the figures that the user's loss returned; complete on rank 0 only."""
    ratios: TurnRatios
    """Turn by turn; complete on rank 0 only."""
    skipped: str | None = None
    """Reason why the weights were not updated: `non_finite_loss` or `non_finite_gradient`."""
    num_updates: int = 1
    """Updates of the step so far; figures without another word are those of the last one."""

    def after(self, earlier: "StepOutcome | None") -> "StepOutcome":
        """Return the outcome of a step whose earlier updates had another one."""
        if earlier is None:
            return self
        spent = {name: earlier.seconds[name] + value for name, value in self.seconds.items()}
        flops, num_updates = earlier.flops + self.flops, earlier.num_updates + 1
        return replace(self, flops=flops, seconds=spent, num_updates=num_updates)


class TargetScores(NamedTuple):
    """What a model thinks of target tokens."""

    logprobs: np.ndarray
    """Of the target tokens after temperature, float64 [T]."""
    likeliest: np.ndarray
    """The model's own choice at the place of each, int64 [T]."""


class Learner:
    """Model and optimizer of one rank."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        """Load the weights (collective).

        Args:
            settings: the same on every rank.
            ranks: this process among its peers.

        Raises:
            ConfigError: the model cannot be loaded, or an optimizer argument is wrong.
        """
        model, trainer = settings.model, settings.trainer
        _seed_everything(settings.seed)
        if trainer.full_determinism:
            # cuBLAS reads it when it initializes, at the first matrix product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(trainer.full_determinism)
        self._ranks = ranks
        self._settings = settings
        self._trainer = trainer
        self._tokenizer_files = read_tokenizer_files(settings.weights.model_path)
        if model.chat_template is not None:
            self._tokenizer_files[TEMPLATE_FILE] = model.chat_template.encode()
        models = RankModels.load(settings, ranks)
        self._policy, self._reference, self._stages = models.policy, models.reference, models.stages
        self._precision = models.precision
        self._export_dtype = export_dtype(settings, models.precision.compute)
        self.flops = models.flops
        """Costs of the whole model."""
        self._passes = self._make_passes()
        trained = (p for p in self._policy.parameters() if p.requires_grad)
        self._optimizer = make_optimizer(trained, trainer, ranks.device)
        self._host_memory = HostMemory()
        self._writer = StateWriter(ranks)
        self._gathered = _Gathered()
        self._random_before = torch.get_rng_state()
        self.is_abandoned = threading.Event()
        """Ends `forward_backward` after the micro-batch in progress; set by another thread of a single rank."""

    @property
    def attention_cost(self) -> float:
        """Cost of a visible pair in units of a token's cost outside attention, for packing."""
        return self.flops.attention_cost

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], algorithm: AlgorithmSection | None = None
    ) -> float:
        """Add the gradients of micro-batches to those since the last `optim_step` (collective).

        The weights of the target tokens are normalized over all micro-batches of all ranks (see
        `data.batch`), so nothing is divided here.

        Args:
            micro_batches: this rank's share of a step.
            algorithm: loss settings in place of the learner's own.

        Returns:
            The loss, summed over all ranks.
        """
        started = time.monotonic()
        self._random_before = torch.get_rng_state()
        gathered, sums = self._gathered, _Sums()
        for micro_batch, outcome in self._passes.forward_backward(
            micro_batches, algorithm or self._settings.algorithm
        ):
            sums.add(micro_batch, outcome, flops=self.flops.row(micro_batch.row))
            gathered.add(micro_batch, outcome)
            if self.is_abandoned.is_set():
                break
        # One collective for all figures of the pass.
        totals = _Sums(*self._ranks.sum(astuple(sums)))
        gathered.totals = gathered.totals.plus(totals)
        gathered.seconds += time.monotonic() - started
        return totals.loss

    def discard_gradients(self) -> None:
        """Be as before the last `forward_backward`, which may have been abandoned; needs a single rank."""
        self._optimizer.zero_grad(set_to_none=True)
        self._gathered = _Gathered()
        torch.set_rng_state(self._random_before)
        self.is_abandoned.clear()

    def problem_of_functions(self, config: RootConfig) -> str | None:
        """Return the first mistake of the user's functions on any rank (collective)."""
        return problem_of_functions(config, self._ranks)

    def optim_step(self, num_done: int) -> StepOutcome:
        """Update the weights with the gradients since the last update (collective).

        If the loss or the gradient is not finite, the model stays unchanged.

        Args:
            num_done: steps done so far, which determine the learning rate.
        """
        started = time.monotonic()
        gathered, self._gathered = self._gathered, _Gathered()
        totals = gathered.totals
        grad_norm = self._passes.clip_gradients(self._trainer.max_grad_norm)
        rate = learning_rate(self._trainer, num_done)
        # Loss and norm are sums over all ranks, so all ranks make the same decision.
        skipped = None
        if not math.isfinite(totals.loss):
            skipped = "non_finite_loss"
        elif not math.isfinite(grad_norm):
            skipped = "non_finite_gradient"
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        count = max(totals.num_targets, 1.0)
        trace = TargetTrace.joined(self._ranks.gather_dp(TargetTrace.joined(gathered.traces)))
        return StepOutcome(
            loss=totals.loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_targets=int(totals.num_targets),
            targets=target_stats(trace),
            trace=trace,
            flops=totals.flops,
            peak_tflops=self._trainer.peak_tflops or peak_tflops(self._ranks.device),
            entropy=totals.entropy / count if self._trainer.log_entropy else None,
            mask_fraction=totals.num_masked / count,
            kl=totals.kl / count if self._reference is not None else None,
            seconds={
                "forward_backward": gathered.seconds,
                "optimizer": time.monotonic() - started,
            },
            loss_metrics={
                name: total / count
                for name, total in _summed(self._ranks.gather_dp(gathered.metrics)).items()
            },
            ratios=TurnRatios.joined(self._ranks.gather_dp(TurnRatios.joined(gathered.ratios))),
            skipped=skipped,
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the mean negative logprob of the target tokens of all ranks (collective)."""
        total, num_targets = 0.0, 0
        for batch, logprobs in self._passes.logprobs(micro_batches):
            total -= float(logprobs.double().sum())
            num_targets += batch.row.num_targets
        total, count = self._ranks.sum([total, num_targets])
        return total / max(count, 1.0)

    def scores(self, micro_batches: Sequence[MicroBatch]) -> list[TargetScores]:
        """Return the scores of each micro-batch's target tokens, if this is the only rank."""
        assert isinstance(self._passes, WholePasses)
        outputs = [self._passes.frozen(batch, with_likeliest=True) for batch in micro_batches]
        return [
            TargetScores(one.logprobs.double().cpu().numpy(), one.likeliest.cpu().numpy())
            for one in outputs
            if one.likeliest is not None
        ]

    def check_merge(
        self, merged: Sequence[MicroBatch], separate: Sequence[MicroBatch]
    ) -> MergeCheck:
        """Compare the step's gradient with that of the same turns as separate rows (collective).

        Args:
            merged: the micro-batches of the step.
            separate: the same turns, unmerged.
        """
        # In bfloat16, rounding moves ratios across clip bounds, which would be reported as an error of
        # merging. REINFORCE has no bounds.
        algorithm = _reinforce(self._settings.algorithm)
        if not self._precision.is_mixed:
            algorithm = self._settings.algorithm
        return check_merge(
            self._policy,
            merged,
            separate,
            accumulate=lambda batches: self._accumulate(batches, algorithm),
            tolerance=STEP_TOLERANCE[self._precision.compute],
            ranks=self._ranks,
            stages=self._stages,
        )

    def _accumulate(
        self, batches: Sequence[MicroBatch], algorithm: AlgorithmSection | None
    ) -> float:
        """Add the gradients of micro-batches, and return this rank's loss."""
        return sum(outcome.loss for _, outcome in self._passes.forward_backward(batches, algorithm))

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory on rank 0; see `export_dtype`.

        If the policy has an adapter, only the adapter is written, in PEFT's format. Collective.
        """
        dtype = self._export_dtype
        if has_adapter(self._policy):
            tensors = adapter_tensors(self._policy, self._stages)
            if self._ranks.is_main:
                save_adapter(self._policy, path, tensors, dtype=self._precision.compute)
            self._ranks.barrier()
            return
        state = self.full_state()
        if self._ranks.is_main:
            rounded = {k.removeprefix(_WRAPPER_PREFIX): v.to(dtype) for k, v in state.items()}
            with self._host_memory.copies(rounded) as weights:
                save_hf(
                    self._policy, path, tokenizer_files=self._tokenizer_files, state_dict=weights
                )
            if self._rounds_exports:
                _write_config_dtype(path, dtype)
        self._ranks.barrier()

    def full_state(self) -> dict[str, torch.Tensor]:
        """Return all weights in host memory on rank 0, {} elsewhere (collective)."""
        if self._stages is not None:
            return self._stages.full_state_dict(self._policy)
        return full_state_dict(self._policy, self._ranks)

    def send_weights(self, max_bytes: int, sink: Callable[[Bucket], None] | None = None) -> None:
        """Gather the weights in compute precision, in buckets (collective).

        Args:
            max_bytes: upper bound on a bucket, unless a single tensor is larger.
            sink: called on rank 0 with every bucket of whole parameters.
        """
        for bucket in in_buckets(self._gathered_parameters(), max_bytes):
            if sink is not None:
                sink(bucket)

    def _gathered_parameters(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield each parameter on rank 0, with its name in the model; gather on all ranks."""

        def converted(part: torch.Tensor) -> torch.Tensor:
            return part.to(self._ranks.device, self._precision.compute)

        parts = sharded_state_dict(self._policy)
        for name, tensor in whole_tensors(parts, self._stages, converted):
            if self._ranks.is_main:
                yield [(name.removeprefix(_WRAPPER_PREFIX), tensor)]

    def move(self, *, to_device: bool) -> None:
        """Move weights and optimizer state to the device, or to host memory."""
        models = [self._policy] if self._reference is None else [self._policy, self._reference]
        device = self._ranks.device if to_device else torch.device("cpu")
        move_state(models, self._optimizer, device, self._host_memory)

    def save_state(self, directory: Path, *, in_background: bool) -> None:
        """Write the state that `load_state` needs besides the exported weights (collective).

        Args:
            directory: created if missing.
            in_background: return as soon as the state is copied; `wait_saved` waits for the files.
        """
        self._writer.write(self._state(), directory, in_background=in_background)

    def wait_saved(self) -> None:
        """Return when the state is written; may be called from another thread."""
        self._writer.wait()

    def load_state(self, directory: Path) -> None:
        """Load the state from `save_state`, which may come from another mesh (collective)."""
        state = self._state()
        read_state(state, directory, self._ranks)
        if "master" in state:
            load_sharded_state_dict(self._policy, state["master"])
        optimizer = get_optimizer_state_dict(self._policy, self._optimizer)
        optimizer["state"] = state["optimizer"]["state"]
        set_optimizer_state_dict(self._policy, self._optimizer, optimizer)
        torch.set_rng_state(state["torch_random"])

    @property
    def _rounds_exports(self) -> bool:
        return self._precision.is_mixed or self._export_dtype != self._precision.master

    def _state(self) -> dict[str, Any]:
        # The list of parameters is omitted, because it differs between the stages of a pipeline.
        optimizer = get_optimizer_state_dict(self._policy, self._optimizer)
        state: dict[str, Any] = {
            "optimizer": {"state": optimizer["state"]},
            "torch_random": torch.get_rng_state(),
        }
        if self._rounds_exports:
            # Exported weights are rounded; updates are too small for their precision and accumulate
            # in the master weights.
            state["master"] = sharded_state_dict(self._policy)
        return state

    def _make_passes(self) -> Passes:
        options: dict[str, Any] = {
            "reference": self._reference,
            "chunk_size": self._trainer.loss_seq_chunk_size,
            "with_entropy": self._trainer.log_entropy,
            "activation_offloading": self._trainer.activation_offloading,
        }
        if self._stages is not None:
            return StagedPasses(self._policy, self._stages, **options)
        autocast = self._precision.autocast(self._ranks)
        return WholePasses(self._policy, autocast=autocast, **options)


@dataclass
class _Sums:
    """Sums over the target tokens of micro-batches, then over ranks.

    All fields are floats, so that the whole object is reduced as one tensor.
    """

    loss: float = 0.0
    num_targets: float = 0.0
    flops: float = 0.0
    entropy: float = 0.0
    num_masked: float = 0.0
    kl: float = 0.0

    def add(self, batch: MicroBatch, outcome: PassOutcome, *, flops: float) -> None:
        self.loss += outcome.loss
        self.flops += flops
        self.num_targets += batch.row.num_targets
        self.num_masked += float(outcome.masked.sum())
        self.kl += outcome.kl
        if outcome.policy.entropies is not None:
            self.entropy += float(outcome.policy.entropies.sum())

    def plus(self, other: "_Sums") -> "_Sums":
        return _Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class _Gathered:
    """The figures of the passes since the last optimizer step."""

    totals: _Sums = field(default_factory=_Sums)
    """Over all ranks; all other fields are of this one."""
    metrics: Counter[str] = field(default_factory=Counter)
    ratios: list[TurnRatios] = field(default_factory=list)
    traces: list[TargetTrace] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, batch: MicroBatch, outcome: PassOutcome) -> None:
        self.metrics.update({name: float(v.sum()) for name, v in outcome.metrics.items()})
        self.ratios.append(TurnRatios.of(batch.turns, outcome.losses, outcome.masked))
        self.traces.append(
            TargetTrace.of(
                batch.turns,
                outcome.policy,
                outcome.behavior_logprobs,
                batch.advantages,
                outcome.losses,
                outcome.masked,
            )
        )


def _reinforce(algorithm: AlgorithmSection | None) -> AlgorithmSection | None:
    """Return the settings with a loss that is linear in the logprobs; None is linear already."""
    if algorithm is None:
        return None
    return algorithm.model_copy(update={"loss_calculator": "REINFORCE", "loss_args": None})


def _summed(parts: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def _write_config_dtype(model_dir: Path, dtype: torch.dtype) -> None:
    """Write the weights' precision into config.json, where inference servers read it."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = dtype_name(dtype)
    write_atomically(path, json.dumps(config, indent=2) + "\n")


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
