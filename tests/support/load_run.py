"""Load a model on meshes of gloo ranks, for a test to look at.

    torchrun --nproc_per_node N tests/support/load_run.py MODEL OUTPUT JSON-LIST-OF-SIZES

With MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ in the environment, or what one load frees
hides what the next one takes. Every rank leaves a JSON file with what it held on each mesh and the memory that it took for it, and
ends with an error where a parameter or buffer is not, bit for bit, what transformers loads.
"""

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentrl.distributed import MeshShape, Ranks, joined_ranks, shard_model
from agentrl.models.load import load_policy
from agentrl.models.parallel import parallelize
from agentrl.models.policy import PolicyModel


def memory(kind: str) -> int:
    """Resident bytes of this process, now (`VmRSS`) or at most since the last reset (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise LookupError(kind)


def bytes_taken(make: Callable[[], Any]) -> tuple[Any, int]:
    """What `make` returns and how far memory rose meanwhile."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what it is now
    before = memory("VmRSS")
    made = make()
    return made, memory("VmHWM") - before


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load(model_path: Path, ranks: Ranks) -> PolicyModel:
    mesh = ranks.shape.build(ranks.device)

    def spread(policy: PolicyModel) -> None:
        parallelize(policy, mesh)
        shard_model(policy, ranks, mesh, compute_dtype=torch.float32)

    return load_policy(model_path, prepare=spread)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(found: torch.nn.Module, plain: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(plain, kind)())
        values = dict(getattr(found, kind)())
        assert values.keys() == expected.keys()
        for name, tensor in values.items():
            assert torch.equal(whole(tensor.detach()), expected[name]), name


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    model_path, output = map(Path, sys.argv[1:3])
    found: list[dict[str, int]] = []
    with joined_ranks() as world:
        for number, sizes in enumerate(json.loads(sys.argv[3])):
            shape = MeshShape.of(world.world_size, **sizes)
            ranks = Ranks(world.rank, world.world_size, world.local_rank, shape)
            if number == 0:
                load(model_path, ranks)  # so that memory of code and groups is there already
            policy, taken = bytes_taken(partial(load, model_path, ranks))
            held = sum(size(local(parameter)) for parameter in policy.parameters())
            found.append({"taken": taken, "held": held})
            plain = AutoModelForCausalLM.from_pretrained(model_path)
            found[-1]["largest"] = max(size(parameter) for parameter in plain.parameters())
            assert_same(policy.model, plain)
            del policy, plain
        alone, taken = bytes_taken(lambda: load_policy(model_path))
        held = sum(size(parameter) for parameter in alone.parameters())
        found.append({"taken": taken, "held": held})
        (output / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
