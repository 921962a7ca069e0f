"""TRL's side of `benchmarks/time_to_reward.py`: its GRPO trainer learns the demo, as JSON lines.

    python benchmarks/time_to_reward_trl.py SEED MAX_STEPS '{"learning_rate": 0.0004}'

Runs in an environment with both TRL and agentrl. Model, questions, tools and prompts equal the
demo's, to the token; the tools are plain functions in this process. It prints one line per step
with the mean reward of all rollouts and the seconds since the start of the process, without
evaluations; the last line reports how it ended.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from datasets import Dataset
from harness.shop_goal import DEMO, HELD_OUT, HeldOut, is_rewarded, training_questions
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.shop.demonstrations import TOOL_SCHEMAS
from examples.shop.server import CATALOGUE, call_tool

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TOOL_LOOP = "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}"
NUM_PROMPTS, NUM_GENERATIONS = 16, 8
"""As in assets/demo/grpo.yaml."""
DEFAULTS: dict[str, Any] = {
    "learning_rate": 4e-4,
    "num_iterations": 2,
    "per_device_train_batch_size": 32,
    "max_completion_length": 160,
    "max_tool_calling_iterations": 5,
    "warmup_steps": 3,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.98,
    "temperature": 1.0,
}


def make_tools() -> list[Callable[..., str]]:
    """Return the shop's tools as functions that TRL can describe to itself."""

    def price(item: str) -> str:
        """Price of a pack.

        Args:
            item: its name.
        """
        return call_tool(CATALOGUE, "price", {"item": item})

    def stock(item: str) -> str:
        """Packs in stock.

        Args:
            item: its name.
        """
        return call_tool(CATALOGUE, "stock", {"item": item})

    def add(a: int, b: int) -> str:
        """Return a + b.

        Args:
            a: first operand.
            b: second operand.
        """
        return call_tool(CATALOGUE, "add", {"a": a, "b": b})

    def subtract(a: int, b: int) -> str:
        """Return a - b.

        Args:
            a: first operand.
            b: second operand.
        """
        return call_tool(CATALOGUE, "subtract", {"a": a, "b": b})

    def multiply(a: int, b: int) -> str:
        """Return a * b.

        Args:
            a: first operand.
            b: second operand.
        """
        return call_tool(CATALOGUE, "multiply", {"a": a, "b": b})

    return [price, stock, add, subtract, multiply]


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the demo's tokenizer, whose template renders the tools as the demo's samplers do.

    The model has not learned to read TRL's more verbose descriptions of functions.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    template = tokenizer.chat_template
    assert _TOOL_LOOP in template
    listed = "".join("\n" + json.dumps(schema) for schema in TOOL_SCHEMAS)
    literal = f"{{{{- {json.dumps(listed)} }}}}"
    tokenizer.chat_template = template.replace(_TOOL_LOOP, literal)
    tokenizer.response_template = qwen3_template
    return tokenizer


def score(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float | None]:
    """Return 1 if the last message contains the right answer, else 0."""
    return [
        float(is_right(messages[-1]["content"], right))
        for messages, right in zip(completions, answer, strict=True)
    ]


def is_right(text: str, answer: str) -> bool:
    """Return whether a message gives the right answer."""
    found = _ANSWER.search(text)
    return found is not None and found[1].strip() == answer


class Watch(TrainerCallback):
    """Reports every step, and ends training when the goal is reached."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.held_out: float | None = None
        self._questions = HeldOut()
        self._apart = 0.0
        self._began = psutil.Process().create_time()

    @property
    def seconds(self) -> float:
        """Seconds of this process without the evaluations."""
        return time.time() - self._began - self._apart

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Record a step's reward; evaluate if the steps are good enough."""
        if logs is None or "reward" not in logs:
            return
        self.rewards.append(float(logs["reward"]))
        print(
            json.dumps(
                {"step": state.global_step, "reward": self.rewards[-1], "seconds": self.seconds}
            )
        )
        sys.stdout.flush()
        if is_rewarded(self.rewards):
            started = time.monotonic()
            self.held_out = self._questions.reward(more["model"])
            self._apart += time.monotonic() - started
            control.should_training_stop = self.held_out >= HELD_OUT


def train(seed: int, max_steps: int, settings: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Train until the goal or the last step; return how it ended."""
    values = DEFAULTS | dict(settings)
    threads = values.pop("threads", os.cpu_count())
    torch.set_num_threads(threads)
    num_rollouts = NUM_PROMPTS * NUM_GENERATIONS
    config = GRPOConfig(
        output_dir=folder,
        seed=seed,
        max_steps=max_steps,
        num_generations=NUM_GENERATIONS,
        gradient_accumulation_steps=num_rollouts // values["per_device_train_batch_size"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **values,
    )
    watch = Watch()
    rows = [
        {"prompt": [{"role": "user", "content": line["query"]}], "answer": line["answer"]}
        for line in training_questions()
    ]
    trainer = GRPOTrainer(
        model=str(DEMO / "model"),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(),
        tools=make_tools(),
        callbacks=[watch],
    )
    trainer.train()
    return {
        "reached": watch.held_out is not None and watch.held_out >= HELD_OUT,
        "held_out": watch.held_out,
        "seconds": watch.seconds,
        "cpu_seconds": time.process_time(),
        "rollouts": len(watch.rewards) * num_rollouts,
        "rewards": watch.rewards,
        "settings": values | {"threads": threads},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(train(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), name)))
