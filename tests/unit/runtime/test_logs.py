import logging
from pathlib import Path

import pytest

from agentrl.config.secrets import redact
from agentrl.runtime.logs import setup_logging


def test_passwords_and_tokens_never_reach_the_log_file(
    tmp_path: Path, root_logger: logging.Logger
) -> None:
    root_logger.handlers.clear()
    path = tmp_path / "logs" / "run_sampler-0.log"
    setup_logging("sampler-0", path, console=False)
    logging.getLogger("agentrl.x").warning(
        "connect mongodb://me:hunter2@db:27017/run with Authorization: Bearer sk-123456"
    )
    text = path.read_text()
    assert "sampler-0 agentrl.x: connect mongodb://me:***@db:27017/run" in text
    assert "hunter2" not in text
    assert "sk-123456" not in text


def test_no_text_forges_a_line_or_steers_the_terminal(
    tmp_path: Path, root_logger: logging.Logger
) -> None:
    root_logger.handlers.clear()
    path = tmp_path / "run.log"
    setup_logging("sampler-0", path, console=False)
    forged = "x\n2026-11-22 10:00:00 INFO    trainer agentrl: all is well\x1b]0;title\x07"
    log = logging.getLogger("agentrl.x")
    log.warning("tool %s failed", forged)
    try:
        raise ValueError(forged + " Bearer sk-123456")
    except ValueError:
        log.exception("gone")
    log.warning("%s", "y" * 2**20)
    lines = path.read_text().splitlines()
    assert [line[:4] for line in lines if line.startswith("20")] == [lines[0][:4]] * 3
    assert not any("\x1b" in line or "sk-123456" in line for line in lines)
    assert lines[0].endswith(
        r"tool x\n2026-11-22 10:00:00 INFO    trainer agentrl: all is well\x1b]0;title\x07 failed"
    )
    assert len(lines[-1]) < 20_000


def test_a_uri_without_a_password_stays_readable() -> None:
    assert redact("mongodb://127.0.0.1:27017/run") == "mongodb://127.0.0.1:27017/run"


def test_the_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    root_logger.handlers.clear()
    setup_logging("trainer", tmp_path / "t.log", console=False)
    assert root_logger.level == logging.DEBUG
