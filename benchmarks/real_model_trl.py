"""The `trl` part of `benchmarks/real_model.py`: TRL's GRPO trainer learns the same shop from the same model.

    python benchmarks/real_model_trl.py MODEL FOLDER MAX_STEPS

Questions, rollouts a step, learning rate, limits and reward function are those of
`assets/demo/smol.yaml`. The tools are plain functions in this process, described by the text that
AgentRL writes into the system prompt; before training, a conversation with calls is rendered by both
sides and must be equal to the token. TRL samples with the model's own `generate`, on the GPU where
there is one. Each step becomes a line of `FOLDER/metrics.jsonl` with the fields of AgentRL's.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from harness.shop_goal import DEMO, training_questions
from time_to_reward_trl import make_tools
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agentrl.renderers import Renderer
from agentrl.renderers.tool_calls.call_format import with_tool_descriptions
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format
from agentrl.rewards.text_scorers import exact
from agentrl.schema.answer_form import find_answer
from agentrl.schema.task import GroundTruth
from examples.shop.demonstrations import TOOL_SCHEMAS, demonstrations

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with calls, as fine-tuning taught them; the model's own template shows none."""


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer with a template that writes calls."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = qwen3_template
    return tokenizer


def told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = TOOL_SCHEMAS
) -> list[dict[str, Any]]:
    """Return a conversation with the system prompt that describes the tools."""
    return with_tool_descriptions(
        [dict(message) for message in messages], tools, get_tool_call_format("hermes")
    )


def check_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare what both sides make of a conversation with calls.

    Raises:
        AssertionError: the tokens differ.
    """
    messages = next(demonstrations(1))["messages"]
    ours = Renderer.load(model).render(messages, TOOL_SCHEMAS, add_generation_prompt=False)
    theirs = tokenizer.apply_chat_template(told(messages), return_dict=False)
    assert list(ours) == theirs, f"{model}: the two sides render a conversation differently"


async def score(completions: Sequence[Any], truth: Sequence[str], **_: Any) -> list[float | None]:
    """Return 1 where the last message gives the right answer, else 0: the scorer `exact`."""
    scores: list[float | None] = []
    for messages, right in zip(completions, truth, strict=True):
        answer = find_answer(messages[-1]["content"], "answer")
        found = await exact(answer or "", GroundTruth(query="", answer=right))
        scores.append(found.value)
    return scores


class Timed(GRPOTrainer):
    """Counts the seconds of sampling, which are part of TRL's step."""

    sampling = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.monotonic()
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.sampling += time.monotonic() - started


class Steps(TrainerCallback):
    """Writes each step as a line."""

    def __init__(self, path: Path, num_records: int) -> None:
        """Write to `path`; a step has `num_records` rollouts."""
        self.trainer: Timed | None = None
        path.unlink(missing_ok=True)
        self._path = path
        self._num_records = num_records
        self._last = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the clock of the first step."""
        self._last = time.monotonic()

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Write a finished step."""
        if self.trainer is None or logs is None or "reward" not in logs:
            return
        now = time.monotonic()
        sampling, self.trainer.sampling = self.trainer.sampling, 0.0
        training = now - self._last - sampling
        self._last = now
        line = {
            "step": state.global_step,
            "loss": float(logs["loss"]),
            "reward_mean": float(logs["reward"]),
            "num_records": self._num_records,
            "share_of_equal_groups": float(logs["frac_reward_zero_std"]),
            "seconds": {"wait_samples": round(sampling, 4), "training": round(training, 4)},
            "time": time.time(),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def configuration(
    recipe: Mapping[str, Any], folder: Path, max_steps: int, *, cpu_rows: int = 8, **more: Any
) -> GRPOConfig:
    """Return TRL's settings for the values of a recipe of AgentRL; the others are its defaults.

    Args:
        recipe: values of AgentRL's flags.
        folder: where TRL writes.
        max_steps: number of steps.
        cpu_rows: rollouts of a forward pass on a CPU; fewer need less memory.
        more: further settings of TRL.
    """
    has_gpu = torch.cuda.is_available()
    num_rollouts = recipe["groups_per_step"] * recipe["num_generations"]
    rows = num_rollouts if has_gpu else cpu_rows
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=max_steps,
        learning_rate=recipe["learning_rate"],
        warmup_steps=recipe["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.98,
        num_generations=recipe["num_generations"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=num_rollouts // rows,
        # TRL limits a rollout's sampled and read tokens together, AgentRL each reply.
        max_completion_length=recipe["max_turns"] * recipe["max_new_tokens"],
        max_tool_calling_iterations=recipe["max_turns"] - 1 or None,
        temperature=1.0,
        use_cpu=not has_gpu,
        bf16=has_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def train(
    model: Path, settings: GRPOConfig, score: Any, rows: Sequence[Mapping[str, Any]], **more: Any
) -> GRPOTrainer:
    """Train on the prompts of `rows`, and write each step into the folder of the settings."""
    folder = Path(str(settings.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    num_rollouts = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    steps = Steps(folder / "metrics.jsonl", num_rollouts)
    dataset = Dataset.from_list([dict(row) for row in rows])
    steps.trainer = Timed(
        model=str(model),
        reward_funcs=score,
        args=settings,
        train_dataset=dataset,
        callbacks=[steps],
        **more,
    )
    steps.trainer.train()
    return steps.trainer


def main(model: Path, folder: Path, max_steps: int) -> None:
    """Train for a number of steps."""
    tokenizer = load_tokenizer(model)
    check_tokens(model, tokenizer)
    recipe = yaml.safe_load((DEMO / "smol.yaml").read_text(encoding="utf-8"))
    rows = [
        {"prompt": told([{"role": "user", "content": line["query"]}]), "truth": line["answer"]}
        for line in training_questions()
    ]
    settings = configuration(recipe, folder, max_steps)
    train(model, settings, score, rows, processing_class=tokenizer, tools=make_tools())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
