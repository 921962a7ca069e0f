"""W&B's own library says whether figures can be sent; the server is one of this machine, or none."""

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.runtime.telemetry.tracker_login import check_login

KEY = "a" * 40
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", NOBODY)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_other_trackers_need_no_login() -> None:
    check_login(["tensorboard"])


@pytest.mark.slow
def test_a_missing_login_is_told_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=f"no login for {NOBODY}; run `wandb login`, set WANDB_A"):
        check_login(["wandb"])


@pytest.mark.slow
def test_nothing_is_needed_to_write_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_login(["wandb"])


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(ConfigError, match=f"{NOBODY} cannot be reached .*set WANDB_MODE=offline"):
        check_login(["wandb"])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["variable", "netrc"])
def test_a_login_and_a_server_that_answers_suffice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, web_server: str, place: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", web_server)
    if place == "variable":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    else:
        host = web_server.removeprefix("http://")
        (tmp_path / "netrc").write_text(f"machine {host}\nlogin user\npassword {KEY}\n")
    check_login(["wandb"])
