from pathlib import Path

import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import build_config
from agentrl.config.named_files import existing_or_shipped, shipped_file

ROOT = Path(__file__).parents[3]


def test_finds_what_the_package_ships() -> None:
    assert shipped_file("assets/demo/model") == ROOT / "assets/demo/model"
    assert shipped_file("examples/shop/server.py").is_file()


def test_a_file_that_is_not_shipped_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"assets/none\.yaml"):
        shipped_file("assets/none.yaml")


def test_a_file_of_the_working_directory_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("assets/demo/train.jsonl")
    assert existing_or_shipped(path) == ROOT / path

    path.parent.mkdir(parents=True)
    path.write_text("{}\n")

    assert existing_or_shipped(path) == path


@pytest.mark.parametrize("name", ["owner/data", "assets/of_mine.jsonl", "/assets/demo/model"])
def test_other_paths_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)

    assert existing_or_shipped(Path(name)) == Path(name)


def test_the_demo_is_configured_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    config = parse_flags(["--config", "assets/demo/grpo.yaml", "--run_name", "demo"])

    assert config.model.model_name_or_path == str(ROOT / "assets/demo/model")
    assert config.data.train_file == ROOT / "assets/demo/train.jsonl"
    assert config.data.eval_file == ROOT / "assets/demo/eval.jsonl"


def test_the_default_model_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert build_config({}).model.model_name_or_path == str(ROOT / "assets/demo/model")
