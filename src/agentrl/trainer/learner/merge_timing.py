"""Times micro-batches in several packings, without an effect on the run.

The passes are those of a step. Gradients that are there already and torch's random state are put back.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from agentrl.data import MicroBatch
from agentrl.distributed import Ranks

_NUM_TIMED = 2
"""Timed passes of every packing, in turns. The fastest counts, since other work only slows passes."""


def packing_seconds(
    policy: nn.Module,
    packings: Sequence[Sequence[MicroBatch]],
    *,
    accumulate: Callable[[Sequence[MicroBatch]], object],
    ranks: Ranks,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds that the slowest rank needs for each packing, after a pass of each (collective).

    Args:
        policy: the model of this rank.
        packings: this rank's micro-batches of each packing.
        accumulate: adds the gradients of micro-batches to the policy.
        ranks: this process among its peers.
        clock: seconds of this rank.
    """
    kept = [(parameter, parameter.grad) for parameter in policy.parameters()]
    policy.zero_grad(set_to_none=True)
    fastest = [float("inf")] * len(packings)
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for number in range(1 + _NUM_TIMED):
            for index, batches in enumerate(packings):
                ranks.barrier()
                started = clock()
                accumulate(batches)
                if devices:
                    torch.cuda.synchronize(ranks.device)
                spent = clock() - started
                if number:  # the first warms up
                    fastest[index] = min(fastest[index], spent)
    for parameter, gradient in kept:
        parameter.grad = gradient
    return [max(seconds) for seconds in zip(*ranks.gather_all(fastest), strict=True)]
