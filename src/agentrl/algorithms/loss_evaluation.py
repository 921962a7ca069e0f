"""The loss that `--loss_calculator` names, applied to target tokens: a built-in one or the user's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from agentrl.algorithms.losses import LOSSES, LossInputs, TargetLosses, plain_losses
from agentrl.errors import UserCodeError


class EvaluatedLoss(NamedTuple):
    """Losses of N target tokens, and the user's figures about them."""

    losses: TargetLosses
    metrics: Mapping[str, torch.Tensor]
    """Name -> value of each target token [N], without gradient."""


def evaluated_loss(inputs: LossInputs, arguments: Mapping[str, Any]) -> EvaluatedLoss:
    """Return the losses by `inputs.settings.kind`.

    Args:
        inputs: of one micro-batch.
        arguments: keyword arguments of the user's function (`--loss_args`).

    Raises:
        ConfigError: there is no such loss.
        UserCodeError: the user's function failed, or returned something else.
    """
    kind = inputs.settings.kind
    result = LOSSES.formula(kind)(inputs, **arguments)
    where = f"--loss_calculator {kind}"
    metrics: object = {}
    if isinstance(result, tuple) and not isinstance(result, TargetLosses):
        if len(result) != 2:
            raise UserCodeError(
                f"{where}: it returned a tuple of {len(result)}; return the loss [N], TargetLosses, "
                "or (loss, metrics)"
            )
        result, metrics = result
    losses = plain_losses(inputs, result) if isinstance(result, torch.Tensor) else result
    if not isinstance(losses, TargetLosses):
        raise UserCodeError(
            f"{where}: it returned {type(losses).__name__}; return the loss [N], TargetLosses, or "
            "(loss, metrics)"
        )
    _check_shapes(losses, inputs, where)
    return EvaluatedLoss(losses, _checked_metrics(metrics, inputs, where))


def _check_shapes(losses: TargetLosses, inputs: LossInputs, where: str) -> None:
    expected = inputs.policy_logprobs
    for name, values in losses._asdict().items():
        if values.shape != expected.shape:
            raise UserCodeError(
                f"{where}: {name} has the shape {list(values.shape)}; return one value for each of "
                f"the {len(expected)} target tokens, without sum or mean"
            )
    if losses.loss.dtype != expected.dtype:
        raise UserCodeError(
            f"{where}: the loss is {losses.loss.dtype} and policy_logprobs {expected.dtype}; compute "
            "in the dtype of policy_logprobs"
        )
    for name in ("keep", "clipped"):
        if getattr(losses, name).dtype != torch.bool:
            raise UserCodeError(f"{where}: {name} is {getattr(losses, name).dtype}; return bool")


def _checked_metrics(metrics: object, inputs: LossInputs, where: str) -> dict[str, torch.Tensor]:
    if not isinstance(metrics, Mapping):
        raise UserCodeError(
            f"{where}: its metrics are {type(metrics).__name__}; return a mapping of names to [N]"
        )
    for name, values in metrics.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise UserCodeError(f"{where}: the metric {name!r} needs a name of letters and _")
        if not isinstance(values, torch.Tensor) or values.shape != inputs.policy_logprobs.shape:
            raise UserCodeError(
                f"{where}: the metric {name} must be a tensor with one value for each target token, "
                "which the product averages"
            )
    return {name: values.detach() for name, values in metrics.items()}
