"""What `--env` names, and every way to get it wrong in one line."""

import os
from pathlib import Path

import pytest

from agentrl.config.sections import DataSection
from agentrl.errors import ConfigError
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.plugins.environments.environment_uri import ENVIRONMENTS
from agentrl.schema import EnvironmentTask


def test_the_set_up_script_installs_what_messages_name() -> None:
    script = (Path(__file__).parents[4] / "scripts/setup_agents").read_text()
    for kind, facts in ENVIRONMENTS.items():
        assert not facts.packages or f"{kind}) packages=({facts.packages}) ;;" in script


def test_a_uri_names_kind_environment_and_typed_arguments() -> None:
    uri = EnvironmentUri.parse("reasoning_gym:leg_counting?size=20&min=0.5&shuffle=true&words=a b")
    assert (uri.kind, uri.name) == ("reasoning_gym", "leg_counting")
    assert uri.args == {"size": 20, "min": 0.5, "shuffle": True, "words": "a b"}


def test_that_a_task_can_be_replayed_is_no_argument_of_the_environment() -> None:
    declared = EnvironmentUri.parse("openenv:http://shop:8000?size=20&replayable=true")
    plain = EnvironmentUri.parse("openenv:http://shop:8000?size=20")
    assert (declared.is_replayable, plain.is_replayable) == (True, False)
    assert (declared.args, declared.id_prefix) == (plain.args, plain.id_prefix)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("reasoning_gm:leg_counting", "unknown kind 'reasoning_gm'; did you mean 'reasoning_gym'?"),
        ("leg_counting", r"unknown kind 'leg_counting' \(known: .*\); write KIND:NAME"),
        ("textarena:", "no environment name; write textarena:NAME"),
        ("textarena:Hangman-v0?size=1&size=2", "give each parameter once"),
        (
            f"textarena:Hangman-v0?seed={10**24}",
            "seed=1000000000000000000000000: expected a number",
        ),
        ("textarena:Hangman-v0?seed=-9223372036854775809", "seed=.*: expected a number of 64 bits"),
        (
            "textarena:Hangman-v0?turns=[1,1e999]",
            r"turns=\[1,1e999\]: expected a number of 64 bits",
        ),
        ("textarena:Hangman-v0?turns=NaN", "turns=NaN: expected a number of 64 bits"),
        (f"textarena:Hangman-v0?size={'9' * 5000}", "size=9999.*: expected a number of 64 bits"),
        (f"textarena:Hangman-v0?size={'[' * 99999}", r"size=\[\[.*: it nests too deeply"),
    ],
)
def test_a_mistake_is_said_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        EnvironmentUri.parse(text)
    assert "\n" not in str(caught.value)


def test_tasks_of_other_arguments_have_other_ids_and_more_of_the_same_keep_theirs() -> None:
    drawn = {
        EnvironmentUri.parse(f"textarena:Hangman-v0?{query}").id_prefix
        for query in ("seed=1&size=10", "seed=1&size=20", "seed=2&size=20")
    }
    assert len(drawn) == 2
    served = EnvironmentUri.parse("openenv:http://127.0.0.1:8000?size=3")
    assert (served.name, served.args) == ("http://127.0.0.1:8000", {"size": 3})
    assert served.id_prefix.startswith("http_127.0.0.1_8000.")


def test_the_environment_of_a_task_is_the_one_that_made_it() -> None:
    uri = EnvironmentUri.parse("textarena:GuessTheNumber-v0?seed=3")
    task = EnvironmentTask(id="t", query="q", env_id=uri.env_id, args=uri.args, row=1)
    assert EnvironmentUri.of(task) == uri


def test_an_environment_has_an_interpreter_of_its_own_where_one_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = EnvironmentUri.parse("textarena:Hangman-v0")
    own = tmp_path / ".agentrl/environments/textarena/bin/python"
    assert uri.python(None) != str(own)
    own.parent.mkdir(parents=True)
    os.symlink("/bin/true", own)
    assert uri.python(None) == str(own)
    with pytest.raises(ConfigError, match=r"--env_python .*: program not found"):
        uri.python(tmp_path)


def test_a_package_that_is_not_installed_costs_one_line_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = EnvironmentUri.parse("textarena:Hangman-v0")
    with (
        EnvironmentProcess(uri, DataSection()) as environment,
        pytest.raises(ConfigError, match="--env textarena:Hangman-v0: textarena is not") as caught,
    ):
        environment.size()
    place = ".agentrl/environments/textarena"
    assert f"`python3 -m venv {place} && {place}/bin/pip install textarena==" in str(caught.value)


def test_an_interpreter_that_is_none_costs_one_line() -> None:
    uri = EnvironmentUri.parse("textarena:Hangman-v0")
    section = DataSection(env_python=Path("/bin/false"))
    with (
        EnvironmentProcess(uri, section) as environment,
        pytest.raises(
            ConfigError, match="the process of textarena:Hangman-v0 exited with status 1"
        ),
    ):
        environment.size()
