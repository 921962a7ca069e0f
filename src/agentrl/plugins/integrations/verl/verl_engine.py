"""The engine `verl`: files for `verl.trainer.main_ppo`, and the command that starts it.

It writes into the run's folder: the agent loop's module, `agent_workers.json` and `agent.yaml`,
which names the module; `reward_func.py` and `reward_worker.json`; `train_data.parquet` and
`test_data.parquet`; `final_trainer.yaml`, which extends verl's own configuration. The files contain
names of environment variables instead of secrets.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.description import (
    WorkerSettings,
    write_worker_settings,
)
from agentrl.plugins.integrations.engine_settings import fill
from agentrl.plugins.integrations.external_engine import ExternalEngine
from agentrl.plugins.integrations.question_rows import read_questions, verl_row
from agentrl.plugins.integrations.reward_functions import RewardFunction

_LOOP_MODULE = '''\
"""Made by AgentTrainer: the agent of agent_workers.json as an agent loop of verl."""

from pathlib import Path

from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.verl.verl_loop import WorkerAgentLoop


class VerlAgentLoop(WorkerAgentLoop):
    """Runs the agent in the interpreter in which it was given."""

    agent = EngineAgent(AgentWorkerPool.load(Path(__file__).with_name("agent_workers.json")))
'''
_REWARD_MODULE = '''\
"""Made by AgentTrainer: the reward function, called in the interpreter in which it was given."""

from pathlib import Path

from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool

workers = AgentWorkerPool.load(Path(__file__).with_name("reward_worker.json"))


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of the reward function."""
    return await workers.reward(
        {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
    )
'''


class VerlEngine(ExternalEngine):
    """Trains with verl.

    The configuration's keys are verl's (nested, or dotted like on its command line), and:
        agent_processes: worker processes of one agent loop worker of verl (1 for a function; 4
            for AWorld's agents, which run one rollout at a time in each).
        verl_python: an interpreter with verl, if this one lacks it; by default the environment
            variable AGENTRL_VERL_PYTHON.
    """

    framework = "verl"
    package = "verl"

    @property
    def config_path(self) -> Path:
        """The configuration that verl starts with."""
        return self.run_path / "final_trainer.yaml"

    @property
    def output_path(self) -> Path:
        """The checkpoints of verl."""
        return self.run_path / "checkpoints"

    @property
    def command(self) -> list[str]:
        """The command that `train` runs, in an environment from `environment`."""
        return [
            *(self._python, "-m", "verl.trainer.main_ppo"),
            *("--config-path", str(self.run_path), "--config-name", self.config_path.stem),
        ]

    def check_config(self, config: Any) -> dict[str, Any]:
        """Fill in missing settings, and write the files that verl needs."""
        settings = self._load_settings(config)
        if any((settings.get("custom_reward_function") or {}).values()):
            raise ConfigError(
                "config: verl no longer supports custom_reward_function; use "
                "reward.custom_reward_function"
            )
        self._write_loop()
        rollout = "actor_rollout_ref.rollout"
        _fill_training(settings)
        fill(settings, f"{rollout}.mode", "async")
        fill(settings, f"{rollout}.multi_turn.format", "hermes")
        fill(settings, f"{rollout}.agent.default_agent_loop", self._loop_name)
        fill(
            settings,
            f"{rollout}.agent.agent_loop_config_path",
            str(self.run_path / "agent.yaml"),
        )
        if self._reward is not None:
            path = self._write_reward(self._reward)
            fill(settings, "reward.custom_reward_function.path", str(path))
            fill(settings, "reward.custom_reward_function.name", "compute_score")
        train = fill(settings, "data.train_files", self._path_of("train"))
        if train is None:
            raise ConfigError("train_dataset: missing; pass it, or data.train_files in config")
        fill(settings, "data.val_files", self._path_of("test") or train)
        fill(settings, "data.return_raw_chat", True)
        fill(settings, "trainer.default_local_dir", str(self.output_path))
        final = {
            "defaults": ["ppo_trainer", "_self_"],
            "hydra": {
                "searchpath": ["pkg://verl.trainer.config"],
                "run": {"dir": str(self.run_path / "hydra")},
            },
            **settings,
        }
        self._write_config(final)
        return settings

    def inference(self, dataset: Any = None) -> Path:
        """Run verl's validation on the test data, and return the folder of its files."""
        if dataset is not None:
            raise ConfigError("dataset: verl validates on test_dataset; give it to AgentTrainer")
        self._run("trainer.val_only=True", "trainer.val_before_train=True")
        return self.output_path

    @property
    def _loop_name(self) -> str:
        return self._module_name("loop")

    def _path_of(self, split: str) -> str | None:
        return str(self._files[split]) if split in self._files else None

    def _write_loop(self) -> None:
        self._write_agent(self._loop_name, _LOOP_MODULE, None)
        entry = {"name": self._loop_name, "_target_": f"{self._loop_name}.VerlAgentLoop"}
        (self.run_path / "agent.yaml").write_text(
            yaml.safe_dump([entry], sort_keys=False), encoding="utf-8"
        )

    def _write_reward(self, reward: RewardFunction) -> Path:
        """Write the module of the reward function, and the settings of its worker."""
        # This worker runs no agent, because verl computes rewards and rollouts in different
        # processes.
        worker = WorkerSettings(
            python=sys.executable,
            processes=1,
            serial=False,
            agent=None,
            reward=reward.reference,
            reward_form=reward.form,
        )
        write_worker_settings(worker, self.run_path / "reward_worker.json")
        path = self.run_path / "reward_func.py"
        path.write_text(_REWARD_MODULE, encoding="utf-8")
        return path

    def _convert_questions(self, questions: Path, split: str) -> Path:
        rows = [
            verl_row(row, number, split, self._loop_name)
            for number, row in enumerate(read_questions(questions))
        ]
        return _write_parquet(rows, questions.with_suffix(".parquet"), f"{split}_dataset")


def _fill_training(settings: dict[str, Any]) -> None:
    """Fill in settings that verl leaves empty or sets for single-turn tasks with a critic."""
    fill(settings, "algorithm.adv_estimator", "grpo")
    fill(settings, "actor_rollout_ref.rollout.n", 8)
    actor = settings["actor_rollout_ref"].setdefault("actor", {})
    if not (actor.get("ppo_micro_batch_size") or actor.get("ppo_micro_batch_size_per_gpu")):
        fill(settings, "actor_rollout_ref.actor.use_dynamic_bsz", True)


def _write_parquet(rows: list[dict[str, Any]], path: Path, argument: str) -> Path:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            "train_engine_name: verl reads Parquet; install pyarrow (pip install 'agentrl-mongo[data]')"
        ) from None
    for row in rows:
        # A column has one type, so values whose type differs between rows are passed as text.
        row["extra_info"] = {
            key: value if isinstance(value, str | int) else json.dumps(value, ensure_ascii=False)
            for key, value in row["extra_info"].items()
        }
    try:
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    except arrow.ArrowException as error:
        raise ConfigError(
            f"{argument}: fields have different types in different rows ({error})"
        ) from None
    return path
