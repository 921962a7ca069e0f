"""One rank's model and optimizer: micro-batches in, one optimizer step out.

Knows nothing of the store, of servers, or of what the terms came from.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.algorithms import policy_loss
from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import MicroBatch
from agentrl.distributed import (
    Ranks,
    clip_gradients,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    shard_model,
)
from agentrl.models.export import save_hf
from agentrl.models.load import load_policy
from agentrl.models.policy import term_logprobs
from agentrl.trainer.optimizer import learning_rate, make_optimizer
from agentrl.trainer.precision import Precision, set_config_dtype
from agentrl.trainer.ratios import TurnRatios, joined, measure

_WRAPPER_PREFIX = "model."


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did; means are over all loss terms of the step."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_terms: int
    clip_fraction: float
    drop_fraction: float
    ratio_mean: float
    logprob_gap: float
    entropy: float | None
    seconds: dict[str, float]
    """Wall time of `forward_backward` and `optimizer` on this rank."""
    ratios: TurnRatios
    """Turn by turn; complete on rank 0 only."""
    skipped: str | None = None
    """Why no step was made: `non_finite_loss` or `non_finite_gradient`."""


class Learner:
    """Model and optimizer of one rank."""

    def __init__(
        self,
        model_path: Path,
        *,
        ranks: Ranks,
        model: ModelSection,
        trainer: TrainerSection,
        algorithm: AlgorithmSection,
        seed: int,
    ) -> None:
        """Load the weights.

        Args:
            model_path: Hugging Face directory; its tokenizer files go along with every export.
            ranks: this process among its peers.
            model: precision and code trust.
            trainer: optimizer settings.
            algorithm: loss settings.
            seed: of whatever is random in training.

        Raises:
            ConfigError: the model cannot be loaded, or an optimizer argument is wrong.
        """
        _seed_everything(seed)
        self._ranks = ranks
        self._model_path = model_path
        self._trainer = trainer
        self._algorithm = algorithm
        self._precision = Precision.of(model.torch_dtype, ranks.device)
        self._policy = load_policy(
            model_path,
            dtype=self._precision.master,
            device=ranks.device,
            trust_remote_code=model.trust_remote_code,
            gradient_checkpointing=trainer.gradient_checkpointing,
        )
        shard_model(self._policy, ranks, compute_dtype=self._precision.compute)
        self._optimizer = make_optimizer(self._policy.parameters(), trainer)
        self._num_done = 0

    def train(self, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """Accumulate the gradients of all micro-batches and make one optimizer step (collective).

        The weights of the terms sum up over all micro-batches of all ranks; nothing is divided
        here. A loss or gradient that is not finite leaves the model as it was.
        """
        started = time.monotonic()
        sums = _Sums()
        ratios = joined([self._accumulate(micro_batch, sums) for micro_batch in micro_batches])
        totals = _Sums(*self._ranks.sum(sums.as_list()))
        accumulated = time.monotonic()
        grad_norm = clip_gradients(self._policy.parameters(), self._trainer.max_grad_norm)
        rate = learning_rate(self._trainer, self._num_done)
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
        count = max(totals.num_terms, 1.0)
        return StepOutcome(
            loss=totals.loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_terms=int(totals.num_terms),
            clip_fraction=totals.num_clipped / count,
            drop_fraction=totals.num_dropped / count,
            ratio_mean=totals.ratio / count,
            logprob_gap=totals.logprob_gap / count,
            entropy=totals.entropy / count if self._trainer.log_entropy else None,
            seconds={
                "forward_backward": accumulated - started,
                "optimizer": time.monotonic() - accumulated,
            },
            ratios=joined(self._ranks.gather(ratios)),
            skipped=skipped,
        )

    def export(self, path: Path) -> None:
        """Write the weights, in compute precision, as a Hugging Face directory on rank 0.

        Collective.
        """
        dtype = self._precision.compute
        state = full_state_dict(self._policy, self._ranks)
        if self._ranks.is_main:
            save_hf(
                self._policy,
                path,
                tokenizer_from=self._model_path,
                state_dict={k.removeprefix(_WRAPPER_PREFIX): v.to(dtype) for k, v in state.items()},
            )
            if self._precision.is_mixed:
                set_config_dtype(path, dtype)
        self._ranks.barrier()

    def optimizer_state(self) -> dict[str, Any]:
        """Return what `load_optimizer_state` needs; whole on rank 0 (collective)."""
        state: dict[str, Any] = {
            "optimizer": full_optimizer_state(self._policy, self._optimizer, self._ranks),
            "num_done": self._num_done,
            "torch_random": torch.get_rng_state(),
        }
        if self._precision.is_mixed:
            # What was exported is rounded; steps add up in the master weights.
            state["master"] = full_state_dict(self._policy, self._ranks)
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; the number of ranks may differ (collective)."""
        if "master" in state:
            load_full_state_dict(self._policy, state["master"], self._ranks)
        load_full_optimizer_state(self._policy, self._optimizer, state["optimizer"], self._ranks)
        self._num_done = state["num_done"]
        torch.set_rng_state(state["torch_random"])

    def _accumulate(self, batch: MicroBatch, sums: "_Sums") -> TurnRatios:
        device = self._ranks.device
        with self._precision.autocast(self._ranks):
            policy = term_logprobs(
                self._policy,
                batch.row,
                chunk_size=self._trainer.loss_seq_chunk_size,
                with_entropy=self._trainer.log_entropy,
            )
        behavior = torch.from_numpy(batch.behavior_logprobs).to(device)
        config = self._algorithm
        terms = policy_loss(
            policy.logprobs,
            behavior,
            torch.from_numpy(batch.advantages).to(device),
            kind=config.loss_calculator,
            epsilon=config.epsilon,
            epsilon_higher=config.epsilon_higher,
            importance_weight_cap_ratio=config.importance_weight_cap_ratio,
            strict_in_bound=config.strict_in_bound,
            out_of_date_decay=config.out_of_date_decay,
            staleness=torch.from_numpy(batch.staleness).to(device),
            beta1=config.beta1,
            beta2=config.beta2,
            sequences=torch.from_numpy(batch.turns).to(device),
        )
        weights = torch.from_numpy(batch.weights).to(device, policy.logprobs.dtype)
        # `where`, not a product: a dropped term may be infinite, and 0 * inf is NaN.
        loss = (weights * torch.where(terms.keep, terms.loss, 0.0)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            sums.loss += float(loss)
            sums.num_terms += batch.row.num_terms
            sums.num_clipped += float(terms.clipped.sum())
            sums.num_dropped += float((~terms.keep).sum())
            sums.ratio += float(terms.ratio.sum())
            sums.logprob_gap += float((policy.logprobs - behavior).abs().sum())
            if policy.entropies is not None:
                sums.entropy += float(policy.entropies.sum())
            return measure(batch.turns, terms)


@dataclass
class _Sums:
    """Sums over loss terms, added up over micro-batches and ranks."""

    loss: float = 0.0
    num_terms: float = 0.0
    num_clipped: float = 0.0
    num_dropped: float = 0.0
    ratio: float = 0.0
    logprob_gap: float = 0.0
    entropy: float = 0.0

    def as_list(self) -> list[float]:
        return list(astuple(self))


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
