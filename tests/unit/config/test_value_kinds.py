"""What flags name: every flag says it, and what others chose may name nothing."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, SecretStr

from agentrl.config.flags import SETTINGS
from agentrl.config.loading import check_foreign
from agentrl.config.own_function import OWN_FUNCTION_FLAGS, BuiltInOr, OwnFunction
from agentrl.config.sections import RootConfig
from agentrl.config.value_kinds import CODE, PLAIN, named_by
from agentrl.errors import ConfigError

CODE_FLAGS = {
    *OWN_FUNCTION_FLAGS,
    *("loss_args", "trust_remote_code", "inference_backend"),
    *("agent", "scorer_module", "sampler_module", "env", "eval_env"),
}


def test_every_flag_says_what_its_values_name() -> None:
    fields = {
        name: field
        for section in RootConfig.model_fields.values()
        for name, field in section.annotation.model_fields.items()  # type: ignore[union-attr]
    }
    assert fields.keys() == SETTINGS.keys()
    undeclared = []
    for name, field in fields.items():
        try:
            named_by(field)
        except TypeError:
            undeclared.append(name)
    assert not undeclared, "say what they name, such as Annotated[str, PLAIN]"
    assert {name for name, flag in SETTINGS.items() if flag.names.kind == "code"} == CODE_FLAGS


def test_a_type_that_could_name_anything_says_nothing_itself() -> None:
    class Section(BaseModel):
        text: str = ""
        some_text: str | None = None
        texts: tuple[str, ...] = ()
        table: dict[str, Any] | None = None
        several: str | Path = ""
        number: Annotated[int | None, "anything"] = None
        path: Path | None = None
        paths: tuple[Path, ...] = ()
        secret: SecretStr | None = None
        plain: Annotated[str | None, PLAIN] = None
        own: OwnFunction | None = None
        kind: Annotated[str, BuiltInOr(("one",))] = "one"

    found: dict[str, str | None] = {}
    for name, field in Section.model_fields.items():
        try:
            found[name] = named_by(field).kind
        except TypeError:
            found[name] = None
    undeclared = ("text", "some_text", "texts", "table", "several")
    assert found == dict.fromkeys(undeclared) | {
        "number": "plain",
        "path": "path",
        "paths": "path",
        "secret": "secret",
        "plain": "plain",
        "own": "code",
        "kind": "code",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.5),
        ("loss_calculator", "gspo"),
        ("loss_calculator", None),
        ("lr_scheduler_type", "cosine"),
        ("model_name_or_path", "assets/demo/model"),
        ("chat_template", "{% for message in messages %}"),
        ("trust_remote_code", False),
        ("report_to", ()),
        ("optim_args", "os.system:call"),
    ],
)
def test_plain_values_and_defaults_are_accepted_from_anybody(name: str, value: Any) -> None:
    check_foreign({name: value}, {}, "a file")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_calculator", "os:system"),
        ("loss_calculator", ["GRPO"]),
        ("loss_calculator", {"GRPO": 1}),
        ("loss_calculator", 7),
        ("group_filter", ""),
        ("trust_remote_code", 1),
        ("chat_template", "template.jinja"),
        ("chat_template", ["{{ messages }}"]),
        ("report_to", ["wandb"]),
        ("mcp_servers", "servers.json"),
        ("db_connection_string", "mongodb://them/x"),
        ("agent_env", ["AWS_SECRET_ACCESS_KEY"]),
    ],
)
def test_what_names_something_is_the_users_alone(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^a file sets --{name} to .* yourself$"):
        check_foreign({name: value}, {name: f"not {value}"}, "a file")
    check_foreign({name: value}, {name: value}, "a file")


def test_the_message_stays_one_short_line() -> None:
    with pytest.raises(ConfigError) as refused:
        check_foreign({"group_filter": "a\nb\x1b[2J" * 10_000}, {}, "a file")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 200
    assert CODE.what == "code"
