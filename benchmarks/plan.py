"""Compares planned memory of the trainer with measured memory.

    python benchmarks/plan.py
    python benchmarks/plan.py --device cuda --out benchmarks/results/plan_cuda.json

Each configuration is planned as by `agentrl plan`, with a step of the learner's code on tensors
without memory, and then measured: a process loads a random model of about 50 million parameters,
runs a step, and then one of two micro-batches. The peak resident memory of the latter counts, less
what the process held before the model. `error` is the difference between plan and measurement,
relative to the measurement; `largest_error` is the largest of them. Memory that kernels and gloo
allocate outside of tensors adds to the difference.

On CUDA, the model has the sizes of Qwen3-0.6B, and the peak of torch's allocations counts. `reserved`
is the memory that torch's allocator took from the device for them.

`--measure NAME` is one process of a measurement. `--only NAME,NAME` measures some configurations again
and keeps the rows of the others.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from harness.results import keep, machine, parser, stored
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.distributed import Ranks, joined_ranks
from agentrl.plugins.planner.rehearsal import FakeDevice, filled_row, rehearse
from agentrl.trainer.bootstrap import mesh_shape
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

Device = Literal["cpu", "cuda"]
_SIZES: dict[Device, dict[str, Any]] = {
    "cpu": {
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "cuda": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    num_tokens: int
    num_chunks: int = 1
    num_ranks: int = 1
    is_mixture: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


_FLEX = {"torch_dtype": "bfloat16", "attention_implementation": "flex"}
_RECOMPUTED = {"gradient_checkpointing": True, "loss_seq_chunk_size": 2048}
CASES: dict[Device, dict[str, Case]] = {
    "cpu": {
        "dense": Case(1024),
        "recomputed": Case(
            2048, trainer={"gradient_checkpointing": True, "loss_seq_chunk_size": 512}
        ),
        "bfloat16": Case(1024, model={"torch_dtype": "bfloat16"}),
        "chunks": Case(1024, num_chunks=4),
        "adapter": Case(1024, model={"lora_rank": 16}),
        "experts": Case(1024, is_mixture=True),
        "two_ranks": Case(1024, num_ranks=2),
        "two_stages": Case(1024, num_ranks=2, trainer={"pp_size": 2}),
    },
    "cuda": {
        "dense": Case(4096, model=_FLEX),
        "recomputed": Case(32_768, model=_FLEX, trainer=_RECOMPUTED),
        "offloaded": Case(
            32_768, model=_FLEX, trainer={**_RECOMPUTED, "activation_offloading": True}
        ),
        "chunks": Case(32_768, num_chunks=4, model=_FLEX, trainer=_RECOMPUTED),
        "adapter": Case(4096, model={**_FLEX, "lora_rank": 16}),
        "experts": Case(4096, is_mixture=True, model=_FLEX),
        "varlen": Case(4096, model={**_FLEX, "attention_implementation": "varlen"}),
    },
}


def write_model(case: Case, path: Path, device: Device) -> None:
    """Write a random model."""
    torch.manual_seed(0)
    sizes = _SIZES[device]
    config: Any = Qwen3Config(**sizes)
    if case.is_mixture:
        experts: dict[str, Any] = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
        }
        config = Qwen3MoeConfig(**sizes, **experts)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config).save_pretrained(path)


def settings(case: Case, path: Path) -> LearnerSettings:
    """Return a learner's settings."""
    model = {"model_name_or_path": str(path), "torch_dtype": "float32", **case.model}
    return LearnerSettings(
        weights=StartWeights(path),
        model=ModelSection.model_validate(model),
        trainer=TrainerSection.model_validate(case.trainer),
        algorithm=AlgorithmSection(),
        seed=0,
    )


def resident(line: str) -> int:
    """Return a line of this process's status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = next(row for row in text.splitlines() if row.startswith(line))
    return int(found.split()[1]) * 1024


def measure(case: Case, path: Path, ranks: Ranks) -> dict[str, int]:
    """Return the bytes that a rank's second step takes beyond an empty process."""
    # Libraries allocate their own memory before the model is loaded.
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))
    ranks.barrier()
    empty = resident("VmRSS")
    learner = Learner(settings(case, path), ranks)
    batch = filled_row(case.num_tokens, case.num_tokens, num_chunks=case.num_chunks)
    learner.forward_backward([batch] * ranks.shape.pp)
    learner.optim_step(0)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        learner.forward_backward([batch] * 2)
        learner.optim_step(0)
        return {
            "measured": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset VmHWM
    learner.forward_backward([batch] * 2 * ranks.shape.pp)
    learner.optim_step(0)
    return {"measured": resident("VmHWM") - empty}


def measured(name: str, case: Case, path: Path, device: Device) -> dict[str, int]:
    """Return the result of `measure` in a separate process, on rank 0."""
    out = path / "measured"
    words = ["--measure", name, "--device", device, "--model", str(path), "--out", str(out)]
    launch = [sys.executable, __file__]
    if case.num_ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launch = [sys.executable, *torchrun, str(case.num_ranks), __file__]
    # Freed blocks return to the system at once: resident memory equals memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, *words], env=environment, check=True)
    found: dict[str, int] = json.loads(out.read_text(encoding="utf-8"))
    return found


def row(device: Device, name: str) -> dict[str, Any]:
    """Plan and measure one configuration."""
    case = CASES[device][name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(case, path, device)
        batch = filled_row(case.num_tokens, case.num_tokens, num_chunks=case.num_chunks)
        learner_settings = settings(case, path)
        shape = mesh_shape(learner_settings.trainer, case.num_ranks)
        simulated: FakeDevice = "gpu" if device == "cuda" else "cpu"
        planned = rehearse(learner_settings, shape, batch, device=simulated).peak
        found = measured(name, case, path, device)
    error = abs(planned - found["measured"]) / found["measured"]
    print(
        f"{name:12} planned {planned / 1e6:7.0f} MB, measured {found['measured'] / 1e6:7.0f} MB, "
        f"{error:.1%}",
        flush=True,
    )
    return {"name": name, **asdict(case), "planned": planned, **found, "error": error}


def main() -> None:
    """Measure and write."""
    flags = parser(__doc__, "plan")
    flags.add_argument("--device", choices=CASES, default="cpu")
    flags.add_argument("--only", help="names of configurations, separated by commas")
    flags.add_argument("--jobs", type=int, default=1, help="configurations at a time, on CUDA")
    flags.add_argument("--measure", metavar="NAME")
    flags.add_argument("--model", type=Path)
    given = flags.parse_args()
    cases = CASES[given.device]
    if given.measure:
        case = cases[given.measure]
        trainer = TrainerSection.model_validate(case.trainer)
        with joined_ranks(partial(mesh_shape, trainer)) as ranks:
            found = measure(case, given.model, ranks)
            if ranks.is_main:
                given.out.write_text(json.dumps(found), encoding="utf-8")
        return
    about = machine()
    if given.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    rows = {one["name"]: one for one in stored(given.out).get("configurations", ())}
    names = given.only.split(",") if given.only else list(cases)
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(row, given.device, name) for name in names]
        for future in as_completed(futures):
            if future.exception() is None:
                rows[future.result()["name"]] = future.result()
                error = max(one["error"] for one in rows.values())
                result: dict[str, Any] = {"largest_error": error, "machine": about}
                keep(given.out, {**result, "configurations": [*rows.values()]})
    for future in futures:
        future.result()  # raises the error of a configuration


if __name__ == "__main__":
    main()
