import shlex
from pathlib import Path

import pytest
import torch

from agentrl.cli.main import main
from agentrl.config.sections import RootConfig

ROOT = Path(__file__).parents[3]

torch.set_num_threads(1)


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


def script_flags(name: str, example: str) -> list[str]:
    """Return the flags with which a script calls `agentrl` when it is started as in `example`."""
    text = (ROOT / f"{name}_example.sh").read_text()
    called = text.partition("exec ")[2].replace("\\\n", " ")
    flags = shlex.split(called.replace('"$run_name" ', "").replace('"$@"', ""))[1:]
    command, run_name, *own = shlex.split(example)
    assert command == f"./{name}_example.sh"
    return [word if word != "--run_name" else f"--run_name={run_name}" for word in flags] + own


def header_examples(name: str) -> list[str]:
    """Return the calls that a script's own comment shows, without the lines that go on elsewhere."""
    text = (ROOT / f"{name}_example.sh").read_text().partition("\nset -")[0]
    lines = text.replace("\\\n#", "").splitlines()
    calls = [line.lstrip("# ") for line in lines if f"./{name}_example.sh RUN_NAME" in line]
    return [call for call in calls if call.startswith("./") and "[--flag" not in call]


def test_the_example_of_the_scripts_header_trains_what_it_names(
    trained: list[RootConfig],
) -> None:
    (example,) = header_examples("grpo")

    assert main(script_flags("grpo", example)) == 0

    (config,) = trained
    assert config.model.model_name_or_path == "Qwen/Qwen3-4B"
    assert config.data.eval_file is None
    assert config.tools.tool_server_command is None


@pytest.mark.parametrize("name", ["grpo", "minirl"])
def test_no_limit_of_the_demo_holds_for_a_model_of_ones_own(
    trained: list[RootConfig], name: str
) -> None:
    own = f"./{name}_example.sh big --model_name_or_path mine --train_file mine.jsonl"

    assert main(script_flags(name, own)) == 0

    (config,) = trained
    plain = RootConfig()
    assert config.sampling == plain.sampling
    assert config.rollout == plain.rollout
    assert config.trainer.max_steps == plain.trainer.max_steps
    assert config.trainer.max_tokens == plain.trainer.max_tokens
    assert config.data.eval_file is None
    assert config.algorithm.loss_calculator == name.upper()


@pytest.mark.parametrize("name", ["grpo", "minirl"])
def test_a_script_without_flags_trains_the_demo(trained: list[RootConfig], name: str) -> None:
    assert main(script_flags(name, f"./{name}_example.sh demo --max_steps 3")) == 0

    (config,) = trained
    assert config.data.train_file == ROOT / "assets/demo/train.jsonl"
    assert config.sampling.max_prompt_tokens == 768
    assert config.trainer.max_steps == 3
    assert config.algorithm.loss_calculator == name.upper()
    assert config.algorithm.strict_in_bound == (name == "minirl")


def test_a_run_with_a_model_of_its_own_is_not_resumed_as_the_demo(
    trained: list[RootConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    written = Path("output/big/config.yaml")
    written.parent.mkdir(parents=True)
    written.write_text("model_name_or_path: /models/mine\ntrain_file: mine.jsonl\n")

    assert main(["run", "--run_name", "big"]) == 2

    assert trained == []
    assert "run 'big' trains /models/mine" in capsys.readouterr().err


def test_a_demo_that_was_moved_to_another_folder_is_still_the_demo(
    trained: list[RootConfig],
) -> None:
    written = Path("output/demo/config.yaml")
    written.parent.mkdir(parents=True)
    written.write_text("model_name_or_path: assets/demo/model\n")

    assert main(["run", "--run_name", "demo"]) == 0

    assert len(trained) == 1


def test_a_project_begins_in_a_new_or_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {"README.md", "config.yaml", "questions.jsonl", "scorers.py", "tools.py"}
    (tmp_path / "used/.venv").mkdir(parents=True)
    for folder in (tmp_path / "new one/deep", tmp_path / "used"):
        assert main(["init", str(folder)]) == 0
        assert {path.name for path in folder.iterdir()} - {".venv"} == names
        assert "agentrl run --config config.yaml" in capsys.readouterr().out
    assert main(["init", "~/at home"]) == 0
    assert "at home" in {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    before = {path: path.read_bytes() for path in (tmp_path / "used").glob("[a-zA-Z]*")}
    (tmp_path / "file").touch()
    for words, problem in (
        ([str(tmp_path / "used")], "used already contains README.md; choose an empty folder"),
        ([str(tmp_path / "file")], "file: File exists; choose another folder"),
        (["/proc/none"], "/proc/none: No such file or directory; choose another folder"),
        ([], "missing argument 'FOLDER'"),
        ([""], "FOLDER is empty; use a dot for the current folder"),
    ):
        assert main(["init", *words]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "used").glob("[a-zA-Z]*")}
