"""`agent_config.yml`: the language models that judge answers and summarize long texts.

Values may refer to environment variables, `${NAME}` or `${NAME:-default}`, so the file need not
contain keys. An invalid section is reported when it is first used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from agentrl.config.named_files import YamlAsTyped, read_text_file
from agentrl.errors import ConfigError
from agentrl.runtime.variables import with_variables


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelEndpoint(_Strict):
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    """Address up to and including `/v1`."""
    model: str
    api_key: SecretStr = SecretStr("")


class ChatModels(_Strict):
    """Models to call in order, and the number of requests to each."""

    models: tuple[ModelEndpoint, ...] = Field(min_length=1)
    """Tried in order."""
    max_retries: int = Field(default=5, ge=0)
    """Further requests to one model after a failure or an unusable reply."""
    retry_delay: float = Field(default=1.0, ge=0)
    """Seconds before the first further request."""
    timeout: float = Field(default=60.0, gt=0)
    """Timeout of one request in seconds, from connecting to the last byte."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Additional keys of the request, such as `temperature`."""


class JudgeSettings(ChatModels):
    """Section `scorer_agent`: the models that judge answers."""

    backoff_factor: float = Field(default=2.0, ge=1)
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Requests to each model, of all samplers together; no limit by default."""
    judge_prompt_template: str | None = None
    """Custom prompt with `{question}`, `{labeled_answer}` and `{pred_answer}`.

    `{nonce}` is replaced with a random mark per answer, so an answer cannot close tags that contain
    it. `{max_chars}` is replaced with the length at which answers are truncated.
    """


class SummarizerSettings(ChatModels):
    """Section `browse_agent`: the models that summarize long tool results and discarded histories."""

    max_retries: int = Field(default=3, ge=0)
    retry_delay: float = Field(default=2.0, ge=0)
    """Seconds before the first further request; doubled each time."""
    timeout: float = Field(default=120.0, gt=0)
    max_prompt_length: int = Field(default=60_000, gt=0)
    """Tokens of a text that the model gets to read; the rest is cut off."""
    min_prompt_length: int = Field(default=1_500, ge=0)
    """Tool results up to this number of tokens are kept unchanged."""
    enable_logging: bool = False
    """Log every summary."""
    browse_tools: tuple[str, ...] = ("fetch_url", "visit", "execute_code")
    """Tools whose results are summarized."""
    default_purpose: dict[str, str] = Field(default_factory=dict)
    """Tool -> purpose of its result if the call gives none."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer for counting; the policy's own by default."""
    status: bool = True
    """False leaves tool results unchanged; histories are summarized in either case."""


class AgentConfig(BaseModel):
    """Sections of the file; None if a section is absent or invalid."""

    model_config = ConfigDict(frozen=True)

    path: str
    scorer_agent: JudgeSettings | None = None
    browse_agent: SummarizerSettings | None = None
    problems: dict[str, str] = Field(default_factory=dict)
    """Section -> its problem."""

    @classmethod
    def load(cls, path: str | Path) -> "AgentConfig":
        """Read the file.

        Raises:
            ConfigError: the file is missing, or is not a YAML mapping.
        """
        try:
            data = yaml.load(read_text_file(Path(path)), YamlAsTyped)
        except OSError as error:
            raise ConfigError(f"--agent_config_path {path}: {error.strerror}") from None
        except RecursionError:
            raise ConfigError(f"agent config {path}: nested too deeply") from None
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"agent config {path}: not YAML ({reason})") from error
        if data is not None and not isinstance(data, dict):
            raise ConfigError(f"agent config {path}: expected a mapping of sections")
        problems: dict[str, str] = {}
        sections = data or {}
        return cls(
            path=str(path),
            scorer_agent=_section(sections, "scorer_agent", JudgeSettings, problems),
            browse_agent=_section(sections, "browse_agent", SummarizerSettings, problems),
            problems=problems,
        )

    def summarizer_settings(self) -> SummarizerSettings | None:
        """Return the section `browse_agent`, None when it is absent.

        Raises:
            ConfigError: it is invalid.
        """
        if "browse_agent" in self.problems:
            raise self._problem_with("browse_agent")
        return self.browse_agent

    def judge_settings(self) -> JudgeSettings:
        """Return the section `scorer_agent`.

        Raises:
            ConfigError: it is absent or invalid.
        """
        if self.scorer_agent is None:
            raise self._problem_with("scorer_agent")
        return self.scorer_agent

    def _problem_with(self, section: str) -> ConfigError:
        problem = self.problems.get(section, "missing")
        return ConfigError(f"agent config {self.path}: {section}: {problem}")


_Section = TypeVar("_Section", bound=_Strict)


def _section(
    data: Mapping[str, object], name: str, kind: type[_Section], problems: dict[str, str]
) -> _Section | None:
    if data.get(name) is None:
        return None
    try:
        return kind.model_validate(with_variables(data[name]))
    except ConfigError as error:
        problems[name] = str(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, first["loc"]))
        problems[name] = f"{location}: {first['msg']}" if location else first["msg"]
    return None
