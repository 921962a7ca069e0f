from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.rewards import AgentConfig

TEXT = """
browse_agent:
  models: [{api_key: "${BROWSE_KEY}", base_url: "http://b/v1", model: reader}]
  browse_tools: [visit]
scorer_agent:
  models:
    - {api_key: "${JUDGE_KEY}", base_url: "${JUDGE_URL:-http://j/v1}", model: judge}
  max_retries: 2
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BROWSE_KEY", "JUDGE_KEY", "JUDGE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "agent_config.yml"
    file.write_text(TEXT)
    return file


def test_keys_come_from_the_environment_and_are_not_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    config = AgentConfig.load(path)
    agent = config.judge_settings()
    assert agent.models[0].api_key.get_secret_value() == "s3cret"
    assert agent.models[0].base_url == "http://j/v1"
    assert agent.max_retries == 2
    assert "s3cret" not in repr(config)
    assert "BROWSE_KEY is not set" in config.problems["browse_agent"]


def test_a_mistake_is_reported_by_who_needs_the_section(path: Path) -> None:
    with pytest.raises(ConfigError, match="scorer_agent: the environment variable JUDGE_KEY"):
        AgentConfig.load(path).judge_settings()
    path.write_text("scorer_agent: {models: []}")
    with pytest.raises(ConfigError, match="scorer_agent: models: Tuple should have at least 1"):
        AgentConfig.load(path).judge_settings()
    path.write_text("scorer_agent: {models: [{base_url: a, model: b}], max_retry: 1}")
    with pytest.raises(ConfigError, match="max_retry: Extra inputs"):
        AgentConfig.load(path).judge_settings()
    path.write_text("scorer_agent: {models: [{base_url: a, model: b}], max_retries: 1:30}")
    with pytest.raises(ConfigError, match="max_retries: Input should be a valid integer"):
        AgentConfig.load(path).judge_settings()
    path.write_text("")
    with pytest.raises(ConfigError, match="scorer_agent: missing"):
        AgentConfig.load(path).judge_settings()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yml"):
        AgentConfig.load(tmp_path / "absent.yml")
    (tmp_path / "bad.yml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yml: not YAML"):
        AgentConfig.load(tmp_path / "bad.yml")
    (tmp_path / "list.yml").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a mapping"):
        AgentConfig.load(tmp_path / "list.yml")
