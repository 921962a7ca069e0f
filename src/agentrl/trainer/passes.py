"""Forward and backward of one micro-batch: from the row to gradients in the parameters."""

from dataclasses import dataclass

import torch
from torch import nn

from agentrl.algorithms.losses import LossTerms, policy_loss, weighted_sum
from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch
from agentrl.models.chunks import ChunkedPass
from agentrl.models.policy import TermLogprobs, term_logprobs


@dataclass(frozen=True, eq=False)
class PassOutcome:
    """What one micro-batch said; nothing here carries a gradient."""

    loss: float
    """Its share of the step's loss."""
    terms: LossTerms
    policy: TermLogprobs
    behavior_logprobs: torch.Tensor


def forward_backward(
    policy: nn.Module,
    batch: MicroBatch,
    algorithm: AlgorithmSection,
    *,
    chunk_size: int,
    with_entropy: bool = False,
    autocast: torch.autocast,
) -> PassOutcome:
    """Add the gradients of a micro-batch to the parameters.

    Args:
        policy: a `PolicyModel`, sharded or not.
        batch: row and terms; a row of several chunks is computed chunk by chunk.
        algorithm: loss settings.
        chunk_size: positions that go through the LM head at a time.
        with_entropy: also compute entropies.
        autocast: precision of the forward passes.
    """
    if batch.num_chunks == 1:
        with autocast:
            output = term_logprobs(
                policy, batch.row, chunk_size=chunk_size, with_entropy=with_entropy
            )
        loss, terms, behavior = _loss(output.logprobs, batch, algorithm)
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        passes = ChunkedPass(
            policy, batch.row, num_chunks=batch.num_chunks, chunk_size=chunk_size, autocast=autocast
        )
        output = passes.forward(with_entropy=with_entropy)
        logprobs = output.logprobs.requires_grad_()
        loss, terms, behavior = _loss(logprobs, batch, algorithm)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        passes.backward(gradient)
    return PassOutcome(
        loss=float(loss.detach()),
        terms=terms._replace(loss=terms.loss.detach()),
        policy=output._replace(logprobs=output.logprobs.detach()),
        behavior_logprobs=behavior,
    )


def _loss(
    logprobs: torch.Tensor, batch: MicroBatch, algorithm: AlgorithmSection
) -> tuple[torch.Tensor, LossTerms, torch.Tensor]:
    device = logprobs.device
    behavior = torch.from_numpy(batch.behavior_logprobs).to(device)
    terms = policy_loss(
        logprobs,
        behavior,
        torch.from_numpy(batch.advantages).to(device),
        kind=algorithm.loss_calculator,
        epsilon=algorithm.epsilon,
        epsilon_higher=algorithm.epsilon_higher,
        importance_weight_cap_ratio=algorithm.importance_weight_cap_ratio,
        strict_in_bound=algorithm.strict_in_bound,
        out_of_date_decay=algorithm.out_of_date_decay,
        staleness=torch.from_numpy(batch.staleness).to(device),
        beta1=algorithm.beta1,
        beta2=algorithm.beta2,
        sequences=torch.from_numpy(batch.turns).to(device),
    )
    return weighted_sum(terms, torch.from_numpy(batch.weights).to(device)), terms, behavior
