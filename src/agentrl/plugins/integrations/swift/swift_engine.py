"""The engine `swift`: questions, a plugin and configurations for ms-swift, and the command to train.

It writes into the run's folder: `swift_plugin.py` and `agent_workers.json`; `train_data.jsonl` and
`test_data.jsonl`; `swift.yaml` for `swift rlhf`, `rollout.yaml` for `swift rollout`. The files
contain names of environment variables instead of secrets.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError
from agentrl.plugins.integrations.engine_settings import fill
from agentrl.plugins.integrations.external_engine import ExternalEngine
from agentrl.plugins.integrations.question_rows import rewrite_questions

_NAME = "agentrl"
"""Name of the scheduler and of the reward in ms-swift's registries."""
_SHARED = ("model", "external_plugins", "multi_turn_scheduler", "vllm_server_port")
"""Settings of the training that its rollout server has as well."""
_GPUS = "CUDA_VISIBLE_DEVICES"
_PLUGIN = f'''\
"""Made by AgentTrainer: the agent and the reward of agent_workers.json, for ms-swift."""

from pathlib import Path

from swift.rewards import orms
from swift.rollout import multi_turns

from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.swift.swift_rollouts import AgentReward, AgentScheduler

workers = AgentWorkerPool.load(Path(__file__).with_name("agent_workers.json"))
AgentReward.workers = workers
AgentScheduler.agent = EngineAgent(workers)
orms["{_NAME}"] = AgentReward
multi_turns["{_NAME}"] = AgentScheduler
'''


class SwiftEngine(ExternalEngine):
    """Trains with ms-swift's GRPO.

    The configuration's keys are the arguments of `swift rlhf`, and:
        rollout: a mapping of further arguments of `swift rollout`.
        agent_processes: worker processes of the rollout server (1 for a function; 4 for AWorld's
            agents, which run one rollout at a time in each).
        swift_python: an interpreter with ms-swift, if this one lacks it; by default the environment
            variable AGENTRL_SWIFT_PYTHON.
    """

    framework = "ms-swift"
    package = "swift"
    needs_all = True

    @property
    def config_path(self) -> Path:
        """The arguments of `swift rlhf`."""
        return self.run_path / "swift.yaml"

    @property
    def output_path(self) -> Path:
        """ms-swift's checkpoints and logs."""
        return self.run_path / "swift"

    @property
    def command(self) -> list[str]:
        """The command that `train` runs, in an environment from `environment`."""
        module = "agentrl.plugins.integrations.swift.swift_process"
        return [self._python, "-m", module, str(self.run_path)]

    def check_config(self, config: Any) -> dict[str, Any]:
        """Fill in missing settings, and write the files that ms-swift needs."""
        settings = self._load_settings(config)
        if not fill(settings, "model", None):
            raise ConfigError("config: model: missing; give the model to train")
        rollout = settings.pop("rollout", None) or {}
        if not isinstance(rollout, Mapping):
            raise ConfigError(f"config: rollout must be a mapping, got {rollout!r}")
        self._write_agent("swift_plugin", _PLUGIN, self._reward)
        self._fill(settings)
        self._write_config(settings)
        served = {key: settings[key] for key in _SHARED}
        served["port"] = served.pop("vllm_server_port")
        served |= {"vllm_use_async_engine": True, "ENV": {_GPUS: "0"}, **rollout}
        path = self.run_path / "rollout.yaml"
        path.write_text(yaml.safe_dump(served, sort_keys=False), encoding="utf-8")
        return settings

    def inference(self, dataset: Any = None) -> Any:
        """Raise an error, because ms-swift evaluates during training.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("ms-swift evaluates during training: pass test_dataset, see its logs")

    def _fill(self, settings: dict[str, Any]) -> None:
        fill(settings, "rlhf_type", "grpo")
        fill(settings, "dataset", str(self._files["train"]))
        if "test" in self._files:
            fill(settings, "val_dataset", str(self._files["test"]))
        fill(settings, "output_dir", str(self.output_path))
        fill(settings, "external_plugins", str(self.run_path / "swift_plugin.py"))
        fill(settings, "reward_funcs", _NAME)
        fill(settings, "multi_turn_scheduler", _NAME)
        fill(settings, "use_vllm", True)
        fill(settings, "vllm_mode", "server")
        fill(settings, "vllm_server_host", "127.0.0.1")
        fill(settings, "vllm_server_port", 8000)
        fill(settings, f"ENV.{_GPUS}", "1")

    def _convert_questions(self, questions: Path, split: str) -> Path:
        rewrite_questions(questions, _swift_row)
        return questions


def _swift_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    messages = list(row.get("messages") or ())
    if not messages:
        messages = [{"role": "user", "content": str(row.get("query", row.get("question")))}]
        if row.get("system_prompt"):
            messages.insert(0, {"role": "system", "content": str(row["system_prompt"])})
    # The rest is one text: a column has one type, and ms-swift gives some names a meaning.
    return {"messages": messages, "agentrl_row": json.dumps(row, ensure_ascii=False)}
