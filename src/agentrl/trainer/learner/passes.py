"""Forward and backward pass of one micro-batch, which accumulates gradients in the parameters.

Chooses the formulas of `agentrl.algorithms` from the flags. Independent of ranks and
optimizers: gradients are sums whose weights are already normalized over the step.

Values saved for the backward pass may be kept in host memory. They are copied bit by bit, so
gradients are the same with and without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from agentrl.algorithms.losses import (
    LossInputs,
    LossSettings,
    TargetLosses,
    corrected,
    cross_entropy,
    evaluated_loss,
    importance_correction,
    kl_penalty,
    proximal_logprobs,
    weighted_sum,
)
from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch
from agentrl.distributed import clip_gradients
from agentrl.models.policy import ChunkedPass, TargetLogprobs, target_logprobs

HOST = torch.device("cpu")
_SMALLEST_BYTES = 1024
"""Smaller copies cost more time than the memory they save is worth."""
_MOST_GAPS = 2
"""A tensor that is spread over more than this multiple of its elements comes back contiguous."""


@dataclass(frozen=True, eq=False)
class PassOutcome:
    """Loss and figures of one micro-batch, without gradients."""

    loss: float
    """Its share of the step's loss."""
    kl: float
    """Sum over its target tokens of the KL estimate against the reference; 0 without one."""
    masked: torch.Tensor
    """bool [T], target tokens that an importance correction masked."""
    losses: TargetLosses
    metrics: Mapping[str, torch.Tensor]
    """Figures of the user's loss, each [T]."""
    policy: TargetLogprobs
    behavior_logprobs: torch.Tensor


class Passes(Protocol):
    """A model's passes over the micro-batches of a share."""

    def forward_backward(
        self, batches: Sequence[MicroBatch], algorithm: AlgorithmSection | None
    ) -> Iterator[tuple[MicroBatch, PassOutcome]]:
        """Add gradients to the parameters (collective).

        Yields:
            Micro-batches with their outcomes, on the rank that reports for its share and on the
            ranks that compute the same.
        """

    def logprobs(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Yield the logprobs [T] of micro-batches likewise, without gradients (collective)."""

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the model's gradient down to a norm; return the norm before (collective)."""


@dataclass(frozen=True)
class WholePasses:
    """Passes of a model whose layers are all on this rank."""

    policy: nn.Module
    reference: nn.Module | None
    """Model of the KL penalty."""
    chunk_size: int
    with_entropy: bool
    activation_offloading: bool
    autocast: torch.autocast

    def forward_backward(
        self, batches: Sequence[MicroBatch], algorithm: AlgorithmSection | None
    ) -> Iterator[tuple[MicroBatch, PassOutcome]]:
        """See `Passes`."""
        for batch in batches:
            yield (
                batch,
                forward_backward(
                    self.policy,
                    batch,
                    algorithm,
                    chunk_size=self.chunk_size,
                    with_entropy=self.with_entropy,
                    autocast=self.autocast,
                    reference=self.reference,
                    activation_offloading=self.activation_offloading,
                ),
            )

    def logprobs(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `Passes`."""
        for batch in batches:
            yield batch, self.frozen(batch).logprobs

    def frozen(self, batch: MicroBatch, *, with_likeliest: bool = False) -> TargetLogprobs:
        """Return the policy's logprobs of a micro-batch, and its likeliest tokens if asked for."""
        return frozen_pass(
            self.policy,
            batch,
            chunk_size=self.chunk_size,
            autocast=self.autocast,
            activation_offloading=self.activation_offloading,
            with_likeliest=with_likeliest,
        )

    def clip_gradients(self, max_norm: float) -> float:
        """See `Passes`."""
        return clip_gradients(self.policy.parameters(), max_norm)


def forward_backward(
    policy: nn.Module,
    batch: MicroBatch,
    algorithm: AlgorithmSection | None,
    *,
    chunk_size: int,
    with_entropy: bool = False,
    autocast: torch.autocast,
    reference: nn.Module | None = None,
    activation_offloading: bool = False,
) -> PassOutcome:
    """Add the gradients of a micro-batch to the parameters.

    Args:
        policy: a `PolicyModel`, sharded or not.
        batch: row and target tokens; a row of several chunks is computed chunk by chunk.
        algorithm: loss settings; None: cross-entropy, the loss of supervised fine-tuning.
        chunk_size: positions that go through the LM head at a time.
        with_entropy: also compute entropies.
        autocast: precision of the forward passes.
        reference: model of the KL penalty; it gets no gradients.
        activation_offloading: keep the activations for the backward pass in host memory.
    """
    offloading = activations_in_host_memory if activation_offloading else nullcontext
    reference_logprobs = None
    if reference is not None:
        reference_logprobs = frozen_pass(
            reference,
            batch,
            chunk_size=chunk_size,
            autocast=autocast,
            activation_offloading=activation_offloading,
        ).logprobs
    if batch.num_chunks == 1:
        with autocast, offloading():
            output = target_logprobs(
                policy, batch.row, chunk_size=chunk_size, with_entropy=with_entropy
            )
        pass_loss = loss_of(output, batch, algorithm, reference_logprobs)
        pass_loss.loss.backward()
    else:
        # The loss needs the logprobs of all chunks (GSPO averages over whole turns), but memory holds
        # the activations of one chunk: forward through all, then the loss, then backward by chunk.
        passes = ChunkedPass(
            policy,
            batch.row,
            num_chunks=batch.num_chunks,
            chunk_size=chunk_size,
            autocast=autocast,
            states_device=chunk_states_device(activation_offloading),
        )
        output = passes.forward(with_entropy=with_entropy)
        output.logprobs.requires_grad_()
        pass_loss = loss_of(output, batch, algorithm, reference_logprobs)
        (gradient,) = torch.autograd.grad(pass_loss.loss, output.logprobs)
        with offloading():
            passes.backward(gradient)
    return pass_loss.outcome(output)


@torch.no_grad()
def frozen_pass(
    model: nn.Module,
    batch: MicroBatch,
    *,
    chunk_size: int,
    autocast: torch.autocast,
    activation_offloading: bool = False,
    with_likeliest: bool = False,
) -> TargetLogprobs:
    """Return a model's logprobs of the target tokens of a micro-batch, without gradients.

    With `activation_offloading`, what passes between chunks is kept in host memory.
    """
    if batch.num_chunks > 1:
        passes = ChunkedPass(
            model,
            batch.row,
            num_chunks=batch.num_chunks,
            chunk_size=chunk_size,
            autocast=autocast,
            states_device=chunk_states_device(activation_offloading),
        )
        return passes.forward(with_likeliest=with_likeliest)
    with autocast:
        return target_logprobs(
            model, batch.row, chunk_size=chunk_size, with_likeliest=with_likeliest
        )


class PassLoss(NamedTuple):
    """The loss of a micro-batch, with its graph, and its components."""

    loss: torch.Tensor
    losses: TargetLosses
    masked: torch.Tensor
    kl: float
    behavior_logprobs: torch.Tensor
    metrics: Mapping[str, torch.Tensor]

    def outcome(self, policy: TargetLogprobs) -> PassOutcome:
        """Return the figures without a graph, together with the policy's outputs."""
        return PassOutcome(
            loss=float(self.loss.detach()),
            kl=self.kl,
            masked=self.masked,
            losses=self.losses._replace(loss=self.losses.loss.detach()),
            metrics=self.metrics,
            policy=policy._replace(logprobs=policy.logprobs.detach()),
            behavior_logprobs=self.behavior_logprobs,
        )


def loss_settings(algorithm: AlgorithmSection) -> LossSettings:
    """Return the settings of the formulas, which `policy_loss` describes, from the flags."""
    return LossSettings(
        kind=algorithm.loss_calculator,
        epsilon=algorithm.epsilon,
        epsilon_higher=algorithm.epsilon_higher,
        dual_clip=algorithm.dual_clip,
        beta1=algorithm.beta1,
        beta2=algorithm.beta2,
        importance_weight_truncation=algorithm.importance_weight_truncation,
        importance_weight_cap_ratio=algorithm.importance_weight_cap_ratio,
        strict_in_bound=algorithm.strict_in_bound,
        out_of_date_decay=algorithm.out_of_date_decay,
    )


def loss_of(
    policy: TargetLogprobs,
    batch: MicroBatch,
    algorithm: AlgorithmSection | None,
    reference_logprobs: torch.Tensor | None,
) -> PassLoss:
    """Return the loss of a micro-batch from the logprobs of its targets [T]."""
    logprobs = policy.logprobs
    device = logprobs.device
    weights = torch.from_numpy(batch.weights).to(device, logprobs.dtype)
    if algorithm is None:
        losses = cross_entropy(logprobs)
        loss = weighted_sum(losses, weights)
        return PassLoss(loss, losses, ~losses.keep, 0.0, logprobs.detach(), {})
    behavior = torch.from_numpy(batch.behavior_logprobs).to(device)
    staleness = torch.from_numpy(batch.staleness).to(device)
    # Turns are renumbered within the micro-batch.
    _, numbers = np.unique(batch.turns, return_inverse=True)
    turns = torch.from_numpy(numbers).to(device)
    proximal = proximal_logprobs(logprobs, behavior, kind=algorithm.proximal, staleness=staleness)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        behavior=behavior.to(logprobs.dtype),
        proximal=proximal,
        reference=reference_logprobs,
        teacher_logprobs=_teachers(batch, algorithm, logprobs),
        entropies=policy.entropies,
        advantages=torch.from_numpy(batch.advantages).to(device, logprobs.dtype),
        staleness=staleness,
        turns=turns,
        records=torch.from_numpy(batch.records).to(device),
        settings=loss_settings(algorithm),
    )
    losses, metrics = evaluated_loss(inputs, algorithm.loss_args or {})
    correction = importance_correction(
        proximal,
        behavior,
        kind=algorithm.importance_correction,
        level=algorithm.correction_level,
        lower=algorithm.correction_lower,
        upper=algorithm.correction_upper,
        veto_threshold=algorithm.veto_threshold,
        sequences=turns,
    )
    losses = corrected(losses, correction)
    loss, total_kl = weighted_sum(losses, weights), 0.0
    if reference_logprobs is not None:
        kl = kl_penalty(logprobs, reference_logprobs, kind=algorithm.kl_estimator)
        loss = loss + algorithm.kl_coefficient * (weights * kl).sum()
        total_kl = float(kl.detach().sum())
    return PassLoss(loss, losses, ~correction.keep, total_kl, behavior, metrics)


def _teachers(
    batch: MicroBatch, algorithm: AlgorithmSection, logprobs: torch.Tensor
) -> torch.Tensor | None:
    """Return the teachers' logprobs [T, K] like the policy's; None without teachers."""
    if not algorithm.teachers:
        return None
    teachers = torch.from_numpy(batch.teacher_logprobs).to(logprobs.device, logprobs.dtype)
    return teachers.expand(-1, len(algorithm.teachers))


@dataclass(frozen=True, eq=False)
class _Offloaded:
    """An offloaded tensor, or one rank's part of it."""

    values: torch.Tensor
    """In host memory; dimensions along which the tensor repeats itself have length 1."""
    strides: tuple[int, ...]
    """Of the values on the device. Kernels rely on them: padded rows of a mask are aligned."""
    size: torch.Size
    device: torch.device
    layout: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None


def chunk_states_device(activation_offloading: bool) -> torch.device | None:
    """Return where what passes between chunks is kept; None: where it is computed."""
    return HOST if activation_offloading else None


@contextmanager
def activations_in_host_memory() -> Iterator[None]:
    """Copy values saved for the backward pass to the host, and back when they are used."""
    with saved_tensors_hooks(_to_host, _to_device):
        yield


def _to_host(tensor: torch.Tensor) -> torch.Tensor | _Offloaded:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or tensor.nbytes < _SMALLEST_BYTES:
        return tensor  # weights stay on the device, saved or not
    layout = None
    local = tensor
    if isinstance(tensor, DTensor):
        layout = (tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())
        local = tensor.to_local()
    size, values = local.size(), local.detach()
    for dimension, stride in enumerate(values.stride()):
        if stride == 0:
            values = values.narrow(dimension, 0, 1)
    strides = values.stride()
    if _extent(values) > _MOST_GAPS * values.numel():
        strides = torch.empty(values.size(), device="meta").stride()
    return _Offloaded(values.to(HOST, copy=True), strides, size, local.device, layout)


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements between a tensor's first and last, both included."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))


def _to_device(saved: torch.Tensor | _Offloaded) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    values = torch.empty_strided(
        saved.values.size(), saved.strides, dtype=saved.values.dtype, device=saved.device
    )
    values = values.copy_(saved.values).expand(saved.size)
    if saved.layout is None:
        return values
    mesh, placements, size, stride = saved.layout
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=size, stride=stride)
