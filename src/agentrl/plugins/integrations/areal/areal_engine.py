"""The engine `areal`: a workflow module and a configuration for AReaL, and the command to start it.

It writes into the run's folder: the workflow's module and `agent_workers.json`; `train_data.jsonl`
and `test_data.jsonl`; `areal.yaml`. The files contain names of environment variables instead of
secrets.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.plugins.integrations.engine_settings import fill
from agentrl.plugins.integrations.external_engine import ExternalEngine
from agentrl.plugins.integrations.question_rows import rewrite_questions

_DEFAULT_SAMPLES = 8
_WORKFLOW_MODULE = '''\
"""Made by AgentTrainer: the agent of agent_workers.json as a rollout workflow of AReaL."""

from pathlib import Path

from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.areal.areal_training import AgentGroupWorkflow


class AgentWorkflow(AgentGroupWorkflow):
    """Runs the agent in the interpreter in which it was given."""

    n_samples = {n_samples}
    agent = EngineAgent(AgentWorkerPool.load(Path(__file__).with_name("agent_workers.json")))
'''


class ArealEngine(ExternalEngine):
    """Trains with AReaL.

    The configuration's keys are those of AReaL's `PPOConfig` (nested or dotted), and:
        agent_processes: worker processes of one rollout worker of AReaL (1 for a function; 4 for
            AWorld's agents, which run one rollout at a time in each).
        areal_python: an interpreter with AReaL, if this one lacks it; by default the environment
            variable AGENTRL_AREAL_PYTHON.
    """

    framework = "AReaL"
    package = "areal"
    needs_all = True

    @property
    def config_path(self) -> Path:
        """The configuration that AReaL starts with."""
        return self.run_path / "areal.yaml"

    @property
    def output_path(self) -> Path:
        """AReaL's files."""
        return self.run_path / "areal"

    @property
    def command(self) -> list[str]:
        """The command that `train` runs, in an environment from `environment`."""
        return [
            *(self._python, "-m", "agentrl.plugins.integrations.areal.areal_training"),
            *(f"{self._module}.AgentWorkflow", "--config", str(self.config_path)),
        ]

    def check_config(self, config: Any) -> dict[str, Any]:
        """Fill in missing settings, and write the files that AReaL needs."""
        settings = self._load_settings(config)
        if not fill(settings, "actor.path", None):
            raise ConfigError("config: actor.path: missing; give the model to train")
        if (settings["actor"].get("reward_norm") or {}).get("mean_level") == "group":
            raise ConfigError(
                "config: actor.reward_norm: the workflow already normalizes rewards per group; "
                "remove it"
            )
        # One episode is a whole group, which the workflow runs.
        n_samples = fill(settings, "gconfig.n_samples", _DEFAULT_SAMPLES)
        settings["gconfig"]["n_samples"] = 1
        self._write_workflow(n_samples)
        self._fill(settings)
        self._write_config(settings)
        return settings

    def inference(self, dataset: Any = None) -> Any:
        """Raise an error, because AReaL evaluates during training."""
        raise ConfigError("AReaL evaluates during training: pass test_dataset, and see its logs")

    @property
    def _module(self) -> str:
        return self._module_name("workflow")

    def _fill(self, settings: dict[str, Any]) -> None:
        folder = str(self.output_path)
        fill(settings, "experiment_name", self._module.replace("_", "-"))
        fill(settings, "trial_name", "trial0")
        fill(settings, "tokenizer_path", "${actor.path}")
        fill(settings, "cluster.fileroot", folder)
        fill(settings, "cluster.name_resolve.type", "nfs")
        fill(settings, "cluster.name_resolve.nfs_record_root", f"{folder}/names")
        fill(settings, "scheduler.type", "local")
        fill(settings, "actor.backend", "fsdp:d1")
        fill(settings, "rollout.backend", "sglang:d1")
        fill(settings, "rollout.tokenizer_path", "${tokenizer_path}")
        fill(settings, "sglang.model_path", "${actor.path}")
        fill(settings, "rollout.consumer_batch_size", "${train_dataset.batch_size}")
        for split, section in (("train", "train_dataset"), ("test", "valid_dataset")):
            if split in self._files:
                fill(settings, f"{section}.path", str(self._files[split]))
                fill(settings, f"{section}.type", "rl")
        for section in ("actor", "rollout", "saver", "recover", "evaluator", "stats_logger"):
            fill(settings, f"{section}.experiment_name", "${experiment_name}")
            fill(settings, f"{section}.trial_name", "${trial_name}")
            if section not in ("actor", "rollout"):
                fill(settings, f"{section}.fileroot", "${cluster.fileroot}")

    def _write_workflow(self, n_samples: Any) -> None:
        assert self._reward is not None, "the reward is checked first"
        if not isinstance(n_samples, int) or n_samples < 2:
            raise ConfigError(
                f"config: gconfig.n_samples must be a whole number from 2, got {n_samples!r}"
            )
        text = _WORKFLOW_MODULE.format(n_samples=n_samples)
        self._write_agent(self._module, text, self._reward)

    def _convert_questions(self, questions: Path, split: str) -> Path:
        # A column has one type, so values whose type differs between rows are passed as text.
        rewrite_questions(questions, _as_text)
        return questions


def _as_text(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"question": json.dumps(row, ensure_ascii=False)}
