"""Train one weight on two gloo ranks in bfloat16, and check where more than that is kept.

    torchrun --nproc_per_node 2 tests/support/precision_run.py

The ranks' gradients are 1 and 2**-10, whose sum bfloat16 rounds to 1; the step is smaller than half
the distance between 1 and the bfloat16 below it.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from agentrl.config.sections import TrainerSection
from agentrl.distributed import clip_gradients, joined_ranks, shard_model
from agentrl.trainer.learner.optimizer import make_optimizer


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.weight * values


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scale()])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layers[0](values)
        return scaled


def main() -> None:
    with joined_ranks() as ranks:
        mesh = ranks.shape.build(ranks.device)
        model = shard_model(Model(), ranks, mesh, compute_dtype=torch.bfloat16)
        weight = next(model.parameters())
        optimizer = make_optimizer(
            model.parameters(), TrainerSection(learning_rate=1e-3), ranks.device
        )
        output = model(torch.full((4,), 2.0 ** (-10 * ranks.rank)))
        assert output.dtype == torch.bfloat16, "computed in bfloat16"
        output.sum().backward()
        assert isinstance(weight, DTensor)
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.dtype == torch.float32
        assert (weight.grad.full_tensor() == 1 + 2**-10).all(), "summed in float32"
        clip_gradients(model.parameters(), 1e9)
        optimizer.step()
        state = optimizer.state[weight]
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}
        assert weight.dtype == torch.float32
        stepped = weight.full_tensor()
        torch.testing.assert_close(stepped, torch.full((4,), 0.999), rtol=0, atol=1e-6)
        assert (stepped.bfloat16() == 1).all(), "a step that bfloat16 weights would not have made"


if __name__ == "__main__":
    main()
