from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.sections import RootConfig


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RootConfig]:
    """What would be trained, by commands that are given in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONGODB_URI", raising=False)
    configs: list[RootConfig] = []

    async def note(config: RootConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("agentrl.launcher.training_run.run_training", note)
    return configs


def test_without_a_model_and_questions_it_is_the_demo(
    trained: list[RootConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--run_name", "demo", "--max_steps", "3"]) == 0

    assert trained[0].data.train_file is not None
    assert trained[0].trainer.max_steps == 3
    assert trained[0].data.default_scorer == "exact"
    assert "assets/demo/grpo.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--train_file", "mine.jsonl"],
        ["--model-name-or-path=mine"],
        ["--db_connection_string", "mongodb://127.0.0.1"],
    ],
)
def test_what_the_user_names_is_not_mixed_with_the_demo(
    trained: list[RootConfig], flags: list[str]
) -> None:
    main(["run", "--run_name", "mine", *flags])

    assert trained[0].data.eval_file is None


def test_a_database_from_the_environment_is_not_mixed_with_the_demo(
    trained: list[RootConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONGODB_URI", "mongodb://127.0.0.1")

    main(["run", "--run_name", "mine"])

    assert trained[0].data.train_file is None


def test_questions_that_were_added_by_hand_are_not_mixed_with_the_demo(
    trained: list[RootConfig],
) -> None:
    Path(".agentrl/mongo/mine").mkdir(parents=True)

    main(["run", "--run_name", "mine"])

    assert trained[0].data.train_file is None
