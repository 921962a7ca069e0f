"""Rehearsals of the trainer's step, in a separate process that imports torch.

Input: a configuration. Output: the memory of a rank in bytes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.runtime.gpus import VISIBLE

_MODULE = "agentrl.plugins.planner.rehearsal.rehearsal_process"


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


class Rehearsals:
    """Rehearses one configuration after another."""

    def __init__(self, model_path: Path, *, on_gpu: bool, errors: IO[bytes]) -> None:
        self._model_path = model_path
        self._on_gpu = on_gpu
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # The process only simulates a GPU.
            env={**os.environ, VISIBLE: ""},
        )

    def rank(self, config: RootConfig) -> RankMemory:
        """Return the memory of rank 0.

        Raises:
            ConfigError: the model cannot be divided this way, or cannot run without values.
        """
        longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
        measured = self._request(
            {
                "model": config.model.model_dump(mode="json"),
                "trainer": config.trainer.model_dump(mode="json"),
                "algorithm": config.algorithm.model_dump(mode="json"),
                "model_path": str(self._model_path),
                "longest": longest,
                "device": "gpu" if self._on_gpu else "cpu",
            }
        )
        state_bytes = measured["weights"] + measured["gradients"] + measured["optimizer"]
        device, host = measured["peak"], measured["offloaded"]
        if self._on_gpu and config.trainer.cpu_offload:
            # With offloading, passes copy one layer at a time to the device.
            device, host = measured["activations"], host + state_bytes
        elif self._on_gpu and config.inference.colocated:
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

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._process_error() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._process_error()
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise ConfigError(answer["problem"])
        return answer

    def _process_error(self) -> ConfigError:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return ConfigError(f"cannot rehearse a step of this model: {lines[-1] if lines else '?'}")


@contextmanager
def rehearsals(model_path: Path, *, on_gpu: bool) -> Iterator[Rehearsals]:
    """Open the process.

    Args:
        model_path: directory with config.json.
        on_gpu: whether to simulate a GPU instead of a CPU.
    """
    with tempfile.TemporaryFile() as errors:
        process = Rehearsals(model_path, on_gpu=on_gpu, errors=errors)
        try:
            yield process
        finally:
            process.close()
