"""Operations that Python dispatches a layer in forward and backward passes on a GPU.

    python benchmarks/dispatches.py        # writes benchmarks/results/dispatches.json; needs no GPU

Counted on tensors without memory (see `agentrl plan`), with the default attention of a GPU, uncompiled,
without the optimizer: the difference between models of four and of two layers, over two. `stock` is the
same layer under the attention of its own, on one conversation of as many tokens as 8 groups have.
Operations that only name the same memory differently (views) are left out: no kernel follows.
"""

import json
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from tree_workloads import Workload, make_groups, single_row

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import MicroBatch, build_step
from agentrl.distributed import MeshShape
from agentrl.plugins.planner.rehearsal.rehearsal import rehearse
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

RESULT = Path(__file__).parent / "results/dispatches.json"
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"model_type": "llama"},
    "windows": {"model_type": "olmo3", "sliding_window": 128},
    "experts": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
    },
}
VIEWS = frozenset(
    [
        "view",
        "t",
        "transpose",
        "slice",
        "unsqueeze",
        "squeeze",
        "expand",
        "alias",
        "detach",
        "_unsafe_view",
        "split",
        "permute",
        "select",
        "as_strided",
        "lift_fresh",
        "device",
    ]
)


class Dispatched(TorchDispatchMode):
    """Counts the operations within the block that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its signature out
        self.counts: Counter[str] = Counter()
        self.is_over = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS and not self.is_over:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def batch_of(workload: Workload) -> MicroBatch:
    """Return the one micro-batch of a workload."""
    step = build_step(make_groups(workload), policy_version=0, token_budget=10**7)
    (batch,) = step.micro_batches[0]
    return batch


def dispatches(kind: str, layers: int, batch: MicroBatch, *, merge: str = "tree") -> Counter[str]:
    """Return the operations of a learner's passes."""
    values = SIZES | KINDS[kind] | {"num_hidden_layers": layers}
    if kind == "hybrid":
        values["layer_types"] = ["linear_attention", "full_attention"] * (layers // 2)
    counted = Dispatched()

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(learner: Learner, *arguments: Any) -> Any:
            learner._optimizer.register_step_pre_hook(lambda *_: setattr(counted, "is_over", True))
            with counted:
                return operation(learner, *arguments)

        return call

    operations: dict[str, Any] = {
        name: counting(getattr(Learner, name)) for name in ("forward_backward", "optim_step")
    }
    with TemporaryDirectory() as folder, patch.multiple(Learner, **operations):
        AutoConfig.for_model(values.pop("model_type"), **values).save_pretrained(folder)
        settings = LearnerSettings(
            weights=StartWeights(Path(folder)),
            model=ModelSection(torch_dtype="bfloat16"),
            trainer=TrainerSection(max_tokens=10**7, merge=merge),
            algorithm=AlgorithmSection(),
            seed=0,
        )
        rehearse(settings, MeshShape(), batch, device="gpu")
    return counted.counts


def per_layer(kind: str, batch: MicroBatch, *, merge: str = "tree") -> float:
    """Return the operations of one layer."""
    few, many = (dispatches(kind, n, batch, merge=merge).total() for n in (2, 4))
    return (many - few) / 2


def measure(kind: str, *, prompt: int = 420, answer: int = 100) -> dict[str, float]:
    """Return the operations a layer with 8 and with 64 groups, and those of the stock layer.

    Args:
        kind: of the model.
        prompt: tokens of each group's prompt.
        answer: tokens of each of its eight answers.
    """
    few, many = (batch_of(Workload(groups, 8, prompt, 1, answer, 1)) for groups in (8, 64))
    stock = batch_of(single_row(few.row.num_tokens))
    return {
        "per_layer_8": per_layer(kind, few),
        "per_layer_64": per_layer(kind, many),
        "stock": per_layer(kind, stock, merge="none"),
    }


def main() -> None:
    """Count for every kind of layer."""
    result: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    }
    for kind in KINDS:
        result[kind] = measure(kind)
        print(kind, result[kind], flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
