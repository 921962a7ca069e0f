"""AgentTrainer itself: what is checked when, and engines of one's own."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl import plugin_registry
from agentrl.errors import AgentRLError, ConfigError
from agentrl.plugin_registry import Plugin
from agentrl.plugins.integrations import AgentTrainer, TrainerProcessor


class Recording(TrainerProcessor):
    """Writes down what it was asked, in order."""

    calls: list[tuple[str, Any]] = []

    def check_agent(self, agent: Any) -> None:
        self.calls.append(("agent", agent))

    def check_dataset(self, dataset: Any, test_dataset: Any = None) -> None:
        self.calls.append(("dataset", (dataset, test_dataset)))

    def check_reward(self, reward_func: Any) -> None:
        self.calls.append(("reward", reward_func))

    def check_config(self, config: Any) -> Any:
        self.calls.append(("config", config))
        return {"complete": True}

    def train(self) -> str:
        return f"trained in {self.run_path.name}"

    def inference(self, dataset: Any = None) -> Any:
        return {"asked": dataset}


@pytest.fixture
def engine() -> Iterator[type[Recording]]:
    Recording.calls = []
    AgentTrainer.register_processor("recording", Recording)
    yield Recording
    AgentTrainer.unregister_processor("recording")


def build(tmp_path: Path, **changes: Any) -> AgentTrainer:
    arguments: dict[str, Any] = {
        "agent": "an agent",
        "config": "a config",
        "reward_func": "a reward",
        "train_dataset": "questions",
        "test_dataset": "others",
        "run_path": tmp_path / "new" / "run",
        "train_engine_name": "recording",
    }
    return AgentTrainer(**{**arguments, **changes})


def test_agent_dataset_reward_and_config_are_checked_in_this_order(
    engine: type[Recording], tmp_path: Path
) -> None:
    trainer = build(tmp_path)
    assert engine.calls == [
        ("agent", "an agent"),
        ("dataset", ("questions", "others")),
        ("reward", "a reward"),
        ("config", "a config"),
    ]
    assert trainer.train_processor.initialized
    assert trainer.config == {"complete": True}
    assert (tmp_path / "new" / "run").is_dir()


def test_nothing_is_checked_after_the_argument_that_cannot_be_used(
    engine: type[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Recording, dataset: Any, test_dataset: Any = None) -> None:
        raise ConfigError("train_dataset: no such file; give another")

    monkeypatch.setattr(engine, "check_dataset", refuse)
    with pytest.raises(ConfigError, match="train_dataset: no such file"):
        build(tmp_path)
    assert [name for name, _ in engine.calls] == ["agent"]


@pytest.mark.parametrize("agent", [None, ""])
def test_without_an_agent_nothing_is_made(agent: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent: missing; pass"):
        build(tmp_path, agent=agent, train_engine_name="no such engine")
    assert not (tmp_path / "new").exists()


def test_an_unknown_engine_is_refused_with_the_nearest_and_all_names(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown engine 'verk'; did you mean 'verl'\? \(known: "
    ):
        build(tmp_path, train_engine_name="verk")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_engine_name": None}, "train_engine_name: unknown engine 'None'"),
        ({"model": "m"}, r'^model: no argument .*; pass config=\{"model_name_or_path": \.\.\.\}'),
        ({"reward_funcs": [1]}, "^reward_funcs: no argument .*; pass reward_func=, one function"),
        ({"run_path": 5}, "run_path: a value of type int is not the path of a folder"),
        ({"run_path": "a\0b"}, r"run_path: .* cannot be created \(embedded null byte\)"),
    ],
)
def test_an_argument_of_another_type_is_refused(
    engine: type[Recording], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)


def test_an_environment_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="env: 5: unknown kind '5'"):
        AgentTrainer(env=5, run_path=tmp_path)  # type: ignore[arg-type]


def test_an_engine_that_is_no_processor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"text": Plugin(training_engines={"text": "builtins:str"})}
    monkeypatch.setattr(plugin_registry, "installed_plugins", lambda: extra)
    with pytest.raises(
        ConfigError, match=r"must derive from agentrl\.integrations\.TrainerProcessor"
    ):
        build(tmp_path, run_path=tmp_path, train_engine_name="text")


def test_training_and_inference_are_the_engines(engine: type[Recording], tmp_path: Path) -> None:
    trainer = build(tmp_path)
    assert trainer.train() == "trained in run"
    assert trainer.evaluate("held out") == {"asked": "held out"}


async def test_a_notebook_whose_thread_has_an_event_loop_evaluates(
    engine: type[Recording], tmp_path: Path
) -> None:
    assert build(tmp_path).evaluate("held out") == {"asked": "held out"}


async def test_inference_awaits_an_engine_that_is_asynchronous(
    engine: type[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def inference(self: Recording, dataset: Any = None) -> str:
        return f"awaited {dataset}"

    assert await build(tmp_path).inference("one") == {"asked": "one"}
    monkeypatch.setattr(engine, "inference", inference)
    assert await build(tmp_path).inference("two") == "awaited two"


def test_an_engine_that_was_not_initialised_does_not_train(
    engine: type[Recording], tmp_path: Path
) -> None:
    trainer = build(tmp_path)
    trainer.train_processor = Recording(tmp_path)
    with pytest.raises(ConfigError, match="not initialized"):
        trainer.train()


def test_a_name_is_registered_once_and_free_again_afterwards(engine: type[Recording]) -> None:
    for name in ("recording", "agentrl", "verl"):
        with pytest.raises(ConfigError, match="is already registered"):
            AgentTrainer.register_processor(name, Recording)
    AgentTrainer.unregister_processor("recording")
    AgentTrainer.unregister_processor("recording")
    assert "recording" not in AgentTrainer.engine_names()
    AgentTrainer.register_processor("recording", Recording)


def test_an_incomplete_engine_is_refused_with_the_methods_that_it_lacks(
    engine: type[Recording], tmp_path: Path
) -> None:
    class Incomplete(Recording):
        check_config = TrainerProcessor.check_config
        train = TrainerProcessor.train

    AgentTrainer.unregister_processor("recording")
    AgentTrainer.register_processor("recording", Incomplete)
    with pytest.raises(ConfigError, match="'recording': Incomplete has no check_config, train; "):
        build(tmp_path)


def test_an_engine_need_not_answer_questions(
    engine: type[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "inference", TrainerProcessor.inference)
    with pytest.raises(ConfigError, match="Recording supports training only; it has no `inference"):
        build(tmp_path).evaluate()


class DocumentedTrainer(TrainerProcessor):
    """An engine of the form that AWorld's documents print: `inference` is not among its methods."""

    def __init__(self, run_path: str) -> None:
        super().__init__(run_path)
        self.framework_config: Any = None

    def train(self) -> None:
        assert self.framework_config

    def check_agent(self, agent: Any) -> None:
        assert agent is not None

    def check_dataset(self, dataset: Any = None, test_dataset: Any = None) -> None:
        assert dataset is None

    def check_reward(self, reward_func: Any = None) -> None:
        assert reward_func is None

    def check_config(self, config: Any = None) -> Any:
        self.framework_config = self.get_default_config() if config is None else config
        return self.framework_config

    @staticmethod
    def get_default_config() -> dict[str, float]:
        return {"learning_rate": 1e-4}


def test_an_engine_as_the_documents_of_aworld_print_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    AgentTrainer.register_processor("my_framework", DocumentedTrainer)
    try:
        trainer = AgentTrainer(agent=object(), train_engine_name="my_framework")
    finally:
        AgentTrainer.unregister_processor(train_engine_name="my_framework")
    trainer.train()
    assert trainer.config == {"learning_rate": 1e-4}
    assert trainer.run_path == tmp_path / "runs"


def test_importing_agentrl_imports_neither_the_trainer_nor_torch() -> None:
    code = (
        "import sys, agentrl; assert 'agentrl.plugins.integrations' not in sys.modules; "
        "sys.modules.update(torch=None, tokenizers=None, transformers=None, mcp=None, pymongo=None); "
        "agentrl.AgentTrainer; import agentrl.plugins.integrations.native_engine, agentrl.plugins.integrations.verl.verl_engine, "
        "agentrl.plugins.integrations.agent_worker.worker_main"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert agentrl.AgentTrainer is AgentTrainer
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = agentrl.Trainer


def test_another_interpreter_that_trains_checks_the_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trains = tmp_path / "python"
    trains.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    trains.chmod(0o755)
    agent = tmp_path / "agent.py"
    agent.write_text("async def play(task, endpoint):\n    return '7'\n")
    trainer = AgentTrainer(
        f"{agent}:play",
        config={"training_python": str(trains), "model_name_or_path": "nowhere/model"},
        train_dataset=[{"query": "How many?", "answer": "7"}],
        run_path=tmp_path / "run",
    )
    with pytest.raises(AgentRLError, match=r"`agentrl run` exited with status 2"):
        trainer.train()
    assert "--model_name_or_path nowhere/model: " in capfd.readouterr().err
    assert not (tmp_path / "run/logs").exists()


def test_an_interpreter_without_agentrl_is_refused_with_what_to_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    agent = tmp_path / "agent.py"
    agent.write_text("async def play(task, endpoint):\n    return '7'\n")
    lacks = rf"^training_python: {python} has no AgentRL; install it with {python} -m pip install"
    with pytest.raises(ConfigError, match=lacks):
        AgentTrainer(
            f"{agent}:play",
            config={"training_python": str(python)},
            train_dataset=[{"query": "How many?", "answer": "7"}],
            run_path=tmp_path / "run",
        )


@pytest.mark.skipif(find_spec("aworld") is not None, reason="AWorld is installed here")
def test_without_aworld_its_agents_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("name: clerk\n")
    trainer = AgentTrainer(
        tmp_path / "agent.yaml",
        train_dataset=[{"query": "How many?", "answer": "7"}],
        run_path=tmp_path / "run",
    )
    with pytest.raises(ConfigError, match=r"agent: AWorld is not installed for .*setup_agents"):
        trainer.train()
    assert not (tmp_path / "run/logs").exists()
