"""One rank's model and optimizer: micro-batches in, one optimizer step out.

Knows nothing of the store, of servers, or of where the target tokens came from. The way to the
gradient is `Learner.train` -> `passes.forward_backward`.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch
from agentrl.distributed import (
    Ranks,
    StateWriter,
    clip_gradients,
    full_state_dict,
    load_sharded_state_dict,
    read_state,
    shard_model,
    sharded_state_dict,
    whole_tensor,
)
from agentrl.distributed.broadcast import Bucket, in_buckets
from agentrl.errors import ConfigError
from agentrl.models.adapter_files import AdapterShape
from agentrl.models.attention.attention_registry import implementation_of
from agentrl.models.checkpoint_export import TEMPLATE_FILE, read_tokenizer_files, save_hf
from agentrl.models.checkpoint_layout import checkpoint_tensors
from agentrl.models.flops import FlopCount, peak_tflops
from agentrl.models.load import load_policy
from agentrl.models.lora import (
    BasePolicy,
    adapter_tensors,
    add_adapter,
    has_adapter,
    load_adapter,
    save_adapter,
    start_adapter,
)
from agentrl.models.parallel import parallelize
from agentrl.models.policy import PolicyModel
from agentrl.models.router_replay import make_routers_replay
from agentrl.models.vision.image_encoders import freeze_encoder
from agentrl.trainer.learner.merge_check import STEP_TOLERANCE, MergeCheck, check_merge
from agentrl.trainer.learner.optimizer import learning_rate, make_optimizer, move_state
from agentrl.trainer.learner.passes import PassOutcome, forward_backward, frozen_logprobs
from agentrl.trainer.learner.settings import LearnerSettings, Precision, adapter_shape
from agentrl.trainer.learner.target_stats import TargetStats, TargetTrace, TurnRatios, target_stats

_WRAPPER_PREFIX = "model."


@dataclass(frozen=True)
class StepOutcome:
    """The result of one optimizer step; means are over all target tokens of the step."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_targets: int
    targets: TargetStats
    """Ratios, clipping and divergence from the sampler; complete on rank 0 only."""
    flops: float
    """Floating-point operations of all ranks' forward and backward passes."""
    peak_tflops: float | None
    """Dense bfloat16 peak of one device in TFLOP/s, if known."""
    entropy: float | None
    """Mean entropy in nats, with `--log_entropy`."""
    mask_fraction: float
    """Share of the target tokens that an importance correction masked."""
    kl: float | None
    """Mean KL estimate against the reference model, if there is one."""
    seconds: dict[str, float]
    """Wall time of `forward_backward` and `optimizer` on this rank."""
    ratios: TurnRatios
    """Turn by turn; complete on rank 0 only."""
    skipped: str | None = None
    """Reason why the weights were not updated: `non_finite_loss` or `non_finite_gradient`."""


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
        model, trainer, algorithm = settings.model, settings.trainer, settings.algorithm
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
        self._precision = Precision.of(model.torch_dtype, ranks.device)
        if model.attention_implementation == "varlen" and not self._precision.is_mixed:
            raise ConfigError(
                "--attention_implementation varlen computes in bfloat16; give --torch_dtype "
                "bfloat16, or use flex or sdpa"
            )
        adapter = adapter_shape(model)
        self._mesh = ranks.build_mesh()
        self._policy = self._load(
            settings.weights.model_path,
            # Below an adapter all weights are frozen, so no master copy is needed.
            dtype=self._precision.master if adapter is None else self._precision.compute,
            adapter=adapter,
            gradient_checkpointing=trainer.gradient_checkpointing,
        )
        if settings.weights.adapter_path is not None:
            load_adapter(self._policy, settings.weights.adapter_path)
        elif adapter is not None:
            start_adapter(self._policy, settings.seed)
        self._flops = FlopCount.of(self._policy)
        self._reference: nn.Module | None = None
        if settings.reference_path is not None:
            self._reference = self._load(
                settings.reference_path, dtype=self._precision.master
            ).requires_grad_(requires_grad=False)
        elif algorithm is not None and algorithm.kl_coefficient and adapter is not None:
            self._reference = BasePolicy(self._policy)
        trained = (p for p in self._policy.parameters() if p.requires_grad)
        self._optimizer = make_optimizer(trained, trainer)
        self._writer = StateWriter(ranks)
        self._num_done = 0

    @property
    def attention_cost(self) -> float:
        """Cost of a visible pair in units of a token's cost outside attention, for packing."""
        return self._flops.attention_cost

    def train(self, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """Accumulate the gradients of all micro-batches and make one optimizer step (collective).

        The weights of the target tokens are normalized over all micro-batches of all ranks (see
        `data.batch`), so nothing is divided here. If the loss or the gradient is not finite, the
        model stays unchanged.
        """
        started = time.monotonic()
        sums, ratios, traces = _Sums(), [], []
        for micro_batch in micro_batches:
            done = self._forward_backward(micro_batch, self._settings.algorithm)
            sums.add(micro_batch, done, flops=self._flops.row(micro_batch.row))
            ratios.append(TurnRatios.of(micro_batch.turns, done.losses, done.masked))
            traces.append(
                TargetTrace.of(
                    done.policy.logprobs,
                    done.behavior_logprobs,
                    micro_batch.advantages,
                    done.losses,
                )
            )
        # One collective for all figures of the step.
        totals = _Sums(*self._ranks.sum(astuple(sums)))
        accumulated = time.monotonic()
        grad_norm = clip_gradients(self._policy.parameters(), self._trainer.max_grad_norm)
        rate = learning_rate(self._trainer, self._num_done)
        # Loss and norm are sums over all ranks, so all ranks take the same decision.
        skipped = None
        if not math.isfinite(totals.loss):
            skipped = "non_finite_loss"
        elif not math.isfinite(grad_norm):
            skipped = "non_finite_gradient"
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._num_done += 1
        self._optimizer.zero_grad(set_to_none=True)
        count = max(totals.num_targets, 1.0)
        return StepOutcome(
            loss=totals.loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_targets=int(totals.num_targets),
            targets=target_stats(
                TargetTrace.joined(self._ranks.gather_dp(TargetTrace.joined(traces)))
            ),
            flops=totals.flops,
            peak_tflops=self._trainer.peak_tflops or peak_tflops(self._ranks.device),
            entropy=totals.entropy / count if self._trainer.log_entropy else None,
            mask_fraction=totals.num_masked / count,
            kl=totals.kl / count if self._reference is not None else None,
            seconds={
                "forward_backward": accumulated - started,
                "optimizer": time.monotonic() - accumulated,
            },
            ratios=TurnRatios.joined(self._ranks.gather_dp(TurnRatios.joined(ratios))),
            skipped=skipped,
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the mean negative logprob of the target tokens of all ranks (collective)."""
        total, num_targets = 0.0, 0
        for batch in micro_batches:
            logprobs = frozen_logprobs(
                self._policy,
                batch,
                chunk_size=self._trainer.loss_seq_chunk_size,
                autocast=self._precision.autocast(self._ranks),
            )
            total -= float(logprobs.double().sum())
            num_targets += batch.row.num_targets
        total, count = self._ranks.sum([total, num_targets])
        return total / max(count, 1.0)

    def check_merge(
        self, merged: Sequence[MicroBatch], separate: Sequence[MicroBatch]
    ) -> MergeCheck:
        """Compare the step's gradient with that of the same turns as separate rows (collective).

        Args:
            merged: the micro-batches of the step.
            separate: the same turns, unmerged.
        """
        algorithm = self._settings.algorithm
        if algorithm is not None and self._precision.is_mixed:
            # In bfloat16, rounding moves ratios across clip bounds, which would be reported as an
            # error of merging. REINFORCE has no bounds.
            algorithm = algorithm.model_copy(update={"loss_calculator": "REINFORCE"})
        return check_merge(
            self._policy,
            merged,
            separate,
            accumulate=lambda batch: self._forward_backward(batch, algorithm).loss,
            tolerance=STEP_TOLERANCE[self._precision.compute],
            ranks=self._ranks,
        )

    def export(self, path: Path) -> None:
        """Write the weights, in compute precision, as a Hugging Face directory on rank 0.

        If the policy has an adapter, only the adapter is written, in PEFT's format. Collective.
        """
        dtype = self._precision.compute
        if has_adapter(self._policy):
            tensors = adapter_tensors(self._policy)
            if self._ranks.is_main:
                save_adapter(self._policy, path, tensors, dtype=dtype)
            self._ranks.barrier()
            return
        state = full_state_dict(self._policy, self._ranks)
        if self._ranks.is_main:
            save_hf(
                self._policy,
                path,
                tokenizer_files=self._tokenizer_files,
                state_dict={k.removeprefix(_WRAPPER_PREFIX): v.to(dtype) for k, v in state.items()},
            )
            if self._precision.is_mixed:
                _write_config_dtype(path, dtype)
        self._ranks.barrier()

    def send_weights(self, max_bytes: int, sink: Callable[[Bucket], None] | None = None) -> None:
        """Gather the weights in compute precision, in buckets (collective).

        Args:
            max_bytes: upper bound on a bucket, unless a single tensor is larger.
            sink: called on rank 0 with every bucket; tensors have their names in the checkpoint.
        """
        for bucket in in_buckets(self._gathered(), max_bytes):
            if sink is not None:
                sink(bucket)

    def _gathered(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the checkpoint tensors of each parameter on rank 0; gather on all ranks."""
        for name, part in sharded_state_dict(self._policy).items():
            whole = whole_tensor(part.to(self._ranks.device, self._precision.compute))
            if self._ranks.is_main:
                yield checkpoint_tensors(name.removeprefix(_WRAPPER_PREFIX), whole)

    def move(self, *, to_device: bool) -> None:
        """Move weights and optimizer state to the device, or to host memory."""
        models = [self._policy] if self._reference is None else [self._policy, self._reference]
        device = self._ranks.device if to_device else torch.device("cpu")
        move_state(models, self._optimizer, device)

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
        set_optimizer_state_dict(self._policy, self._optimizer, state["optimizer"])
        self._num_done = int(state["num_done"])
        torch.set_rng_state(state["torch_random"])

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "optimizer": get_optimizer_state_dict(self._policy, self._optimizer),
            "num_done": torch.tensor(self._num_done),
            "torch_random": torch.get_rng_state(),
        }
        if self._precision.is_mixed:
            # Exported weights are rounded to compute precision; updates are too small for it and
            # accumulate in the master weights.
            state["master"] = sharded_state_dict(self._policy)
        return state

    def _load(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        adapter: AdapterShape | None = None,
        gradient_checkpointing: bool = False,
    ) -> PolicyModel:
        def prepare(policy: PolicyModel) -> None:
            if self._settings.model.router_replay:
                make_routers_replay(policy.model)
            if not self._settings.model.train_vision:
                freeze_encoder(policy.model)
            if adapter is not None:
                add_adapter(policy.model, adapter, dtype=self._precision.master)
            parallelize(policy, self._mesh)
            shard_model(
                policy,
                self._ranks,
                self._mesh,
                compute_dtype=self._precision.compute,
                cpu_offload=self._trainer.cpu_offload,
            )

        model = self._settings.model
        attention: str | None = implementation_of(model.attention_implementation)
        if self._trainer.merge == "none" and self._ranks.shape.cp == 1:
            attention = None
        return load_policy(
            path,
            dtype=dtype,
            device=self._ranks.device,
            attention=attention,
            trust_remote_code=model.trust_remote_code,
            gradient_checkpointing=gradient_checkpointing,
            prepare=prepare,
            cpu_offload=self._trainer.cpu_offload or self._settings.starts_in_host_memory,
        )

    def _forward_backward(
        self, batch: MicroBatch, algorithm: AlgorithmSection | None
    ) -> PassOutcome:
        return forward_backward(
            self._policy,
            batch,
            algorithm,
            chunk_size=self._trainer.loss_seq_chunk_size,
            with_entropy=self._trainer.log_entropy,
            autocast=self._precision.autocast(self._ranks),
            reference=self._reference,
            activation_offloading=self._trainer.activation_offloading,
        )


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

    def add(self, batch: MicroBatch, done: PassOutcome, *, flops: float) -> None:
        self.loss += done.loss
        self.flops += flops
        self.num_targets += batch.row.num_targets
        self.num_masked += float(done.masked.sum())
        self.kl += done.kl
        if done.policy.entropies is not None:
            self.entropy += float(done.policy.entropies.sum())


def _write_config_dtype(model_dir: Path, dtype: torch.dtype) -> None:
    """Write the weights' precision into config.json, where inference servers read it."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    staging = model_dir / ".config.json.tmp"
    staging.write_text(json.dumps(config, indent=2) + "\n")
    staging.replace(path)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
