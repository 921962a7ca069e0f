"""The engine `sft`: supervised fine-tuning on conversations with AgentRL's trainer.

Training does not use the agent; `inference` evaluates it with the fine-tuned model.
"""

from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DatasetError
from agentrl.plugins.integrations.native_engine import NativeEngine
from agentrl.plugins.integrations.question_rows import write_rows
from agentrl.plugins.integrations.reward_functions import check_reward_function
from agentrl.plugins.integrations.trainer_processor import TrainerProcessor
from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations


class SftEngine(NativeEngine):
    """Fine-tunes a model on conversations with `agentrl sft`.

    The rows of the datasets have `messages` and, for conversations with tools, `tools`. The
    configuration's keys are the flags of `agentrl sft`, and `agent_processes` and `training_python`
    as for the engine `agentrl`.
    """

    check_environment = TrainerProcessor.check_environment

    def check_dataset(self, dataset: Any, test_dataset: Any = None) -> None:
        """Write the conversations to `train_data.jsonl` and `test_data.jsonl`."""
        if dataset is None:
            raise ConfigError("train_dataset: missing; pass conversations: rows with `messages`")
        super().check_dataset(dataset, test_dataset)

    def check_reward(self, reward_func: Any) -> None:
        """Find the reward function, which scores the answers of `inference`."""
        if reward_func is not None:
            self._reward = check_reward_function(reward_func, self.run_path)

    def inference(self, dataset: Any = None) -> dict[str, Any]:
        """Evaluate the agent with the fine-tuned model; return the content of `eval.json`."""
        if dataset is None:
            raise ConfigError("dataset: missing; pass questions for the agent")
        return super().inference(dataset)

    def _write_data(self, dataset: Any, path: Path, argument: str) -> None:
        write_rows(dataset, path, argument, dict)
        try:
            for _ in read_demonstrations(path):
                pass
        except DatasetError as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise DatasetError(f"{argument}: {reason}") from None

    def _training_command(self) -> list[str]:
        return ["agentrl", "sft"]
