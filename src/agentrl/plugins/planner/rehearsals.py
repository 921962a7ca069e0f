"""A rehearsal of the trainer's step, in a separate process that imports torch.

Input: a configuration. Output: the memory of a rank in bytes.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.errors import AgentWorkerError, ConfigError
from agentrl.runtime.gpus import VISIBLE
from agentrl.runtime.processes.request_process import RequestProcess

_MODULE = "agentrl.plugins.planner.rehearsal.rehearsal_process"
_REHEARSAL_SECONDS = 1800.0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank, and the costs of its model."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Memory of passes besides these three: activations, logits, gathered and rounded weights."""
    peak: int
    """Peak memory on the device."""
    host: int
    """Peak host memory, if the device has separate memory."""
    num_parameters: int
    num_trained: int
    flops_per_token: float
    """Operations of forward and backward passes outside attention."""
    flops_per_pair: float
    """Operations of attention for each token that a token attends to."""
    flops_per_head_position: float


def rehearsed_rank(config: RootConfig, model_path: Path, *, on_gpu: bool) -> RankMemory:
    """Rehearse a step of rank 0, and return its memory."""
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    measured = _measured(
        {
            "model": config.model.model_dump(mode="json"),
            "trainer": config.trainer.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "model_path": str(model_path),
            "longest": longest,
            "device": "gpu" if on_gpu else "cpu",
        }
    )
    state_bytes = measured["weights"] + measured["gradients"] + measured["optimizer"]
    device, host = measured["peak"], measured["offloaded"]
    if on_gpu and config.trainer.cpu_offload:
        # With offloading, passes copy one layer at a time to the device.
        device, host = measured["activations"], host + state_bytes
    elif on_gpu and config.inference.colocated:
        host += measured["weights"] + measured["optimizer"]  # while the servers sample
    flops = measured["flops"]
    return RankMemory(
        weights=measured["weights"],
        gradients=measured["gradients"],
        optimizer=measured["optimizer"],
        activations=measured["activations"],
        peak=device,
        host=host,
        num_parameters=measured["num_parameters"],
        num_trained=measured["num_trained"],
        flops_per_token=flops["per_token"],
        flops_per_pair=flops["per_pair"],
        flops_per_head_position=flops["per_head_position"],
    )


def _measured(request: Mapping[str, Any]) -> dict[str, Any]:
    # The process only simulates a GPU.
    environment = {**os.environ, VISIBLE: ""}
    argv = [sys.executable, "-m", _MODULE]
    with closing(RequestProcess("the rehearsal", argv, environment, quiet=True)) as process:
        try:
            answer = process.ask_and_wait(request, _REHEARSAL_SECONDS)
        except AgentWorkerError as error:
            raise ConfigError(f"cannot rehearse a step of this model: {error}") from None
        except TimeoutError:
            raise ConfigError(
                f"cannot rehearse a step of this model within {_REHEARSAL_SECONDS:.0f} s"
            ) from None
    if "problem" in answer:
        raise ConfigError(answer["problem"])
    return answer
