"""The trainer's way to the device and back, which it takes twice a step with `--colocated`."""

import pytest
import torch
from harness.trees import tiny_policy
from torch.optim import AdamW

from agentrl.distributed import HostMemory
from agentrl.trainer.learner.optimizer import move_state

pytestmark = pytest.mark.gpu


def test_steps_go_on_after_a_stay_in_host_memory_and_nothing_is_left_on_the_device() -> None:
    host, device = torch.device("cpu"), torch.device("cuda")
    weights = {}
    others = torch.cuda.memory_allocated()  # such as workspaces of matrix products
    for moves in (False, True):
        torch.manual_seed(0)
        memory = HostMemory()
        used: list[set[int]] = []
        policy = tiny_policy("qwen3", torch.float32)
        optimizer = AdamW(policy.parameters(), lr=0.01)
        move_state([policy], optimizer, device, memory)
        parameters = list(policy.parameters())
        for step in range(3):
            for parameter in policy.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * step + 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if moves:
                move_state([policy], optimizer, host, memory)
                assert torch.cuda.memory_allocated() == others
                states = optimizer.state.values()
                moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
                held = (*parameters, *policy.buffers(), *moments)
                assert all(tensor.is_pinned() for tensor in held)
                used.append({tensor.data_ptr() for tensor in held})
                assert used[-1] == used[0]  # the memory of the first stay
                move_state([policy], optimizer, device, memory)
        # The optimizer goes on with the same parameters, and those that are tied stay so.
        assert all(a is b for a, b in zip(policy.parameters(), parameters, strict=True))
        move_state([policy], optimizer, host, memory)
        weights[moves] = [parameter.clone() for parameter in policy.parameters()]
    assert all(map(torch.equal, weights[False], weights[True]))
