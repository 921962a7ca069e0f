"""`agentrl push_to_hub` against a stand-in: what is sent, what is refused, and where the token goes."""

from pathlib import Path

import pytest
from support.hub_stand_in import hub_stand_in

from agentrl.cli.main import main

pytest.importorskip("huggingface_hub")
TOKEN = "hf_a_token_of_the_tests"


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's output with two checkpoints, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for step in ("000001", "000002"):
        model = tmp_path / f"output/mine/checkpoints/{step}/model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(f'{{"step": {int(step)}}}')
        (model / "model.safetensors").write_bytes(b"weights of " + step.encode())
    return tmp_path / "output/mine"


def test_the_newest_checkpoint_becomes_a_model_with_a_card(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["push_to_hub", "me/shop-agent", "--run_name", "mine", "--private"]
    with hub_stand_in(TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main([*words, "--model_name_or_path", "Qwen/Qwen3-0.6B"]) == 0
    (made,) = hub.created
    assert (made["organization"], made["name"]) == ("me", "shop-agent")
    assert made["visibility"] == "private"
    assert {name.rpartition("shop-agent/")[2] for name in hub.files} == {
        *("README.md", "config.json", "model.safetensors")
    }
    assert hub.files["models/me/shop-agent/model.safetensors"] == b"weights of 000002"
    card = hub.files["models/me/shop-agent/README.md"].decode()
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    captured = capsys.readouterr()
    assert f"is at {hub.url}/me/shop-agent" in captured.out
    assert TOKEN not in captured.out + captured.err


def test_an_exported_data_set_goes_to_a_repository_of_its_kind(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = output.parent / "talks"
    (folder / "data").mkdir(parents=True)
    (folder / "data/train.parquet").write_bytes(b"rows")
    (folder / "README.md").write_text("---\ntags: [mine]\n---\n")
    (folder / ".cache").touch()
    with hub_stand_in(TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main(["push_to_hub", "me/talks", "--dataset", str(folder)]) == 0
    assert hub.created[0]["type"] == "dataset"
    assert hub.files == {
        "datasets/me/talks/README.md": b"---\ntags: [mine]\n---\n",
        "datasets/me/talks/data/train.parquet": b"rows",
    }


@pytest.mark.parametrize(
    ("words", "token", "status", "message"),
    [
        (["me/x", "--run_name", "mine"], "", 2, "set HF_TOKEN to a token with write access"),
        (["me/x", "--run_name", "none"], TOKEN, 2, "output/none contains no checkpoint"),
        (["me/x/y", "--run_name", "mine"], TOKEN, 2, "'me/x/y' is not a valid repository name"),
        (["me/x", "--dataset", "nowhere"], TOKEN, 2, "'nowhere' does not exist"),
        (["me/x", "--dataset", "empty"], TOKEN, 2, "empty contains no files to upload"),
        (
            ["me/x", "--run_name", "mine"],
            "hf_\u00e9",
            2,
            "HF_TOKEN contains a character that tokens",
        ),
        (
            ["me/x", "--run_name", "mine"],
            "hf_another",
            1,
            "check that HF_TOKEN has write access to it",
        ),
        ([], TOKEN, 2, "missing argument 'REPOSITORY'"),
    ],
)
def test_what_cannot_be_uploaded_costs_one_line(
    words: list[str],
    token: str,
    status: int,
    message: str,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (output.parents[1] / "empty").mkdir()
    monkeypatch.setenv("HF_TOKEN", token)
    with hub_stand_in(TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main(["push_to_hub", *words]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "hf_another" not in error
    assert not hub.files


def test_a_hub_that_does_not_answer_is_named(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_stand_in(TOKEN) as hub:
        pass
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert main(["push_to_hub", "me/x", "--run_name", "mine"]) == 1
    error = capsys.readouterr().err
    assert "no response from the hub: ConnectError" in error
    assert error.count("\n") == 1
