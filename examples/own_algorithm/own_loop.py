"""GRPO as a loop of one's own: the loss and each call of a step are written out.

python examples/own_algorithm/own_loop.py --max_steps=50

trains the demo until its mean reward is 0.8. After Ctrl-C or kill -9, the same command resumes it.
"""

import asyncio
import sys

import torch

from agentrl import open_run
from agentrl.algorithms.losses import LossInputs, bounded_log_ratio
from agentrl.trainer.rl.training_loop import TrainingRun

ENOUGH = 0.8


def grpo(inputs: LossInputs, *, lower: float, upper: float) -> torch.Tensor:
    """Return `-min(r * A, clip(r, 1 - lower, 1 + upper) * A)` of each target token."""
    ratio = bounded_log_ratio(inputs.policy_logprobs, inputs.proximal).exp()
    bounded = ratio.clamp(1.0 - lower, 1.0 + upper)
    return -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)


async def learn(run: TrainingRun, enough: float = ENOUGH) -> None:
    """Make the steps of a run until the mean reward of one is `enough`."""
    async for groups in run.groups():
        batch = await run.build_step(groups)
        for _ in range(run.updates_per_step):
            await run.learner.forward_backward(batch, grpo, lower=0.2, upper=0.3)
            await run.learner.optim_step()
        if run.is_commit_due:
            await run.commit()
        metrics = await run.publish()
        reward = metrics.reward_mean or 0.0
        print(f"step {metrics.step}: reward {reward:.2f}", flush=True)
        if reward >= enough:
            break


async def main(**flags: str) -> None:
    """Train; the flags are those of `agentrl run`, and override the file's."""
    flags = {"run_name": "own_loop", "config": "assets/demo/grpo.yaml", **flags}
    async with open_run(**flags) as run:
        await learn(run)


if __name__ == "__main__":
    asyncio.run(main(**dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])))
