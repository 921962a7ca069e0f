"""Flat values and YAML files to a `RootConfig`, and back to a file for child processes and people.

Input: values by flag name, as typed or from YAML (or JSON) with one flag per line. Output: a
configuration that was checked as a whole. Command lines are parsed elsewhere (`command_line`).
"""

import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr, TypeAdapter, ValidationError

from agentrl.config.flags import (
    ADVANCED,
    NO_EFFECT,
    ONE_VALUE,
    OPTIM_PARTS,
    ORIGINAL,
    SETTINGS,
    SHORTHANDS,
    Flag,
    canonical_name,
    unknown_flag,
)
from agentrl.config.named_files import YamlAsTyped, existing_or_shipped, read_text_file
from agentrl.config.private_files import write_private
from agentrl.config.recipes import expand_recipe
from agentrl.config.secrets import HIDDEN, SECRET_TYPES, redact, remember, secrets_of
from agentrl.config.sections import SECTIONS, RootConfig
from agentrl.config.validation.checks import check_config
from agentrl.errors import ConfigError

SECRET_ENVIRONMENT = {
    "db_connection_string": "MONGODB_URI",
    "mcp_auth_token": "MCP_SERVER_TOKEN",
    "inference_api_key": "AGENTRL_API_KEY",
    "inference_admin_key": "AGENTRL_ADMIN_KEY",
    "metrics_key": "AGENTRL_METRICS_KEY",
}
"""Flag -> environment variable that gives the secret when no flag does; children get them this way."""

_MAX_SHOWN = 60
_HOME = re.compile(r"~[\w.-]*/")
_ONE_SHOT = {"fresh", "delete_existing"}
"""Flags that apply to one start rather than to the run; they are not written to files."""


def load_config(typed: Mapping[str, Any]) -> RootConfig:
    """Return the configuration of a process from its flags.

    Flags override the values of the file that `config` names, and of the private file that
    `write_config` wrote next to it. Secrets that neither provides, and the machine's rank among
    several, are read from the environment.
    """
    values = dict(typed)
    path = values.pop("config", None)
    if path == "":
        raise ConfigError("--config is empty: give a file, or remove the flag")
    if path is not None:
        file = existing_or_shipped(Path(os.path.expanduser(path)))
        # A recipe has the precedence of its source: a typed one overrides values of the file.
        values = expand_recipe(read_yaml(file)) | _private_values(file) | expand_recipe(values)
    return build_config(values)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file by canonical flag name."""
    try:
        content = yaml.load(read_text_file(path), YamlAsTyped)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(
            f"--config {path}: nested too deeply; write `flag: value` lines"
        ) from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"--config {path} is not valid YAML: {problem}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected `flag: value` lines")
    for key in content:
        if key in ADVANCED and key not in ORIGINAL:
            raise ConfigError(f"--config {path}: move {key} below `advanced:`")
    return canonical_values(content, f"--config {path}")


def _flattened(given: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Return values without the level of `advanced:`."""
    values = {key: value for key, value in given.items() if key != "advanced"}
    advanced = given.get("advanced", {})
    if not isinstance(advanced, Mapping):
        raise ConfigError(f"{where}: expected `name: value` lines below advanced:")
    for key in advanced:
        if key not in ADVANCED:
            similar = get_close_matches(str(key), ADVANCED, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "see docs/advanced.md"
            raise ConfigError(f"{where}: advanced: {key} is not known; {hint}")
        if key in values:
            raise ConfigError(f"{where}: {key} is given twice; keep one")
    return {**values, **advanced}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as `read_yaml` reads them: those without a flag below `advanced:`."""
    advanced = {name: value for name, value in values.items() if name in ADVANCED - {*ORIGINAL}}
    plain = {name: value for name, value in values.items() if name not in advanced}
    return {**plain, "advanced": advanced} if advanced else plain


def canonical_values(given: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return values by canonical flag name."""
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in _flattened(given, where).items():
        text = str(key)
        if text in SECTIONS and isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: flags are not grouped in sections; remove {text!r} and move the lines "
                "below it to the left margin"
            )
        name = canonical_name(text)
        if name in values:
            raise ConfigError(
                f"{where}: {spellings[name]!r} and {text!r} are the same flag; keep one"
            )
        values[name], spellings[name] = value, text
    return values


def origins(typed: Mapping[str, Any], config: RootConfig) -> dict[str, str]:
    """Return where each value of a configuration comes from."""
    path = typed.get("config")
    in_file = {} if path is None else read_yaml(existing_or_shipped(Path(os.path.expanduser(path))))
    recipe = typed.get("recipe", in_file.get("recipe"))
    in_recipe = expand_recipe({"recipe": recipe})
    given = (
        dict.fromkeys(in_recipe, f"recipe {recipe}")
        | dict.fromkeys(_flags_set_by(in_file), f"file {path}")
        | dict.fromkeys(_flags_set_by(typed), "flag")
    )
    given.pop("recipe", None)  # replaced by its flags
    found = {}
    for name, value in values_of(config).items():
        variable = SECRET_ENVIRONMENT.get(name)
        if name in given:
            found[name] = given[name]
        elif value.is_default:
            found[name] = "default"
        elif variable is not None and os.environ.get(variable):
            found[name] = f"variable {variable}"
        else:
            found[name] = "derived"
    return found


def _flags_set_by(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags that values set, including those behind shorthands."""
    for typed_name, value in values.items():
        name = canonical_name(typed_name)
        if name in SHORTHANDS:
            name = SHORTHANDS[name][0]
        elif name in OPTIM_PARTS:
            name = "optim_args"
        elif name == "preferred_sampling_params":
            preferred = _convert(name, value)
            yield from preferred if isinstance(preferred, dict) else ()
        yield name


def build_config(values: Mapping[str, Any]) -> RootConfig:
    """Validate flat values (strings as typed, or already typed) into a `RootConfig`."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    optim_parts: dict[str, Any] = {}
    values = canonical_values(values, "configuration")
    _remember_secrets(values)
    for name, value in expand_recipe(values).items():
        if name in SETTINGS:
            sections[SETTINGS[name].section][name] = _convert(name, value)
        elif name in ONE_VALUE:
            _check_only_value(name, value)
        elif name in NO_EFFECT:
            sys.stderr.write(f"note: --{name} has no effect here: {NO_EFFECT[name]}\n")
        elif name in OPTIM_PARTS:
            optim_parts[name] = value
        elif name not in SHORTHANDS:
            raise ConfigError(unknown_flag(name))
    for name in SHORTHANDS.keys() & values.keys():
        _expand_shorthand(name, values[name], sections)
    if optim_parts:
        _join_optim_args(optim_parts, sections["trainer"])
    _fill_from_environment(sections)
    try:
        config = RootConfig.model_validate(sections)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None
    remember(secret for one in values_of(config).values() for secret in secrets_of(one.value))
    return check_config(_apply_preferred_sampling(config))


def _remember_secrets(values: Mapping[str, Any]) -> None:
    """Register secrets before validation, because error messages may quote a misplaced secret."""
    for name, variable in SECRET_ENVIRONMENT.items():
        given = values.get(name) or os.environ.get(variable, "")
        remember(secrets_of(SecretStr(str(given))))


def check_foreign(values: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Refuse values that name something which the user's own values do not."""
    for name, value in values.items():
        flag = SETTINGS[name]
        if not flag.is_plain(value) and own.get(name) != value:
            raise ConfigError(
                f"{where} sets --{name} to {repr(value)[:_MAX_SHOWN]}, and only you can name "
                f"{flag.names.what}: if you trust it, give {flag.typed} yourself"
            )


@dataclass(frozen=True)
class FlagValue:
    """A setting's value in the forms in which it leaves the process, all of them JSON-compatible."""

    flag: Flag
    value: Any
    is_given: bool

    @property
    def is_default(self) -> bool:
        """Whether it is the default, given or not."""
        return bool(self.value == self.flag.field.get_default(call_default_factory=True))

    @property
    def shown(self) -> Any:
        """What people may read: `***` for secrets, except a database URI that contains none."""
        if not isinstance(self.value, SecretStr):
            return _plain(getattr(self.value, "public", self.value))
        text: str = self.value.get_secret_value()
        has_secret = self.flag.name != "db_connection_string" or redact(text) != text
        return HIDDEN if has_secret else text

    @property
    def complete(self) -> Any:
        """What the user gave, with its secrets."""
        is_secret = isinstance(self.value, SECRET_TYPES)
        return _plain(self.value.get_secret_value() if is_secret else self.value)

    @property
    def is_kept(self) -> bool:
        """Whether files of the run have it: it is of more than this start, and no secret as a whole."""
        is_secret = isinstance(self.value, SecretStr) and self.shown == HIDDEN
        return self.flag.name not in _ONE_SHOT and not is_secret

    @property
    def is_of_machine(self) -> bool:
        """Whether it was derived from this machine: each machine derives its own."""
        return not self.is_given and not self.is_default


def values_of(config: RootConfig) -> dict[str, FlagValue]:
    """Return all values by flag name."""
    return {
        name: FlagValue(SETTINGS[name], value, name in section.model_fields_set)
        for _, section in config
        for name, value in section
    }


def flat_values(config: RootConfig) -> dict[str, Any]:
    """Return the values that files of the run keep, by flag name; None for those of this machine."""
    values = values_of(config).items()
    return {name: None if one.is_of_machine else one.shown for name, one in values if one.is_kept}


def _plain(value: Any) -> Any:
    """Return a value in the types of YAML and JSON."""
    return json.loads(json.dumps(value, default=str))


def write_config(config: RootConfig, path: Path, made: Collection[str] = ()) -> None:
    """Write the resolved configuration as YAML, in sections, readable only by its owner.

    Values with secrets are written to a separate file next to it (`config.secrets.yaml`), so that
    the configuration can be shared. Secrets from the user's environment are not written.
    """
    public = flat_values(config)
    values = values_of(config)
    private = {
        name: values[name].complete
        for name, value in public.items()
        if value is not None and value != values[name].complete
    }
    lines = ["# The resolved configuration of this run, without secrets.\n"]
    shown = nested(
        {
            name: value
            for name, value in public.items()
            if name not in private and value not in (None, "", [])
        }
    )
    advanced = {"advanced": shown.pop("advanced", {})}
    for section, cls in SECTIONS.items():
        section_values = {name: shown[name] for name in cls.model_fields if name in shown}
        if section_values:
            lines.append(f"\n# {section}\n{yaml.safe_dump(section_values, sort_keys=False)}")
    lines.append(f"\n{yaml.safe_dump(advanced, sort_keys=False)}")
    lines += [
        f"\n# {name}: {public[name]} (complete in {_private_file(path).name})" for name in private
    ]
    write_private(path, "".join(lines).rstrip("\n") + "\n")
    private |= {name: values[name].complete for name in made}
    if private:
        write_private(_private_file(path), yaml.safe_dump(nested(private), sort_keys=False))
    else:
        _private_file(path).unlink(missing_ok=True)


def _private_values(path: Path) -> dict[str, Any]:
    """Return the values of the private file next to a configuration that this process may know.

    An empty environment variable withholds its secret: samplers must not know the admin key.
    """
    file = _private_file(path)
    values = read_yaml(file) if file.exists() else {}
    withheld = {
        name for name, variable in SECRET_ENVIRONMENT.items() if os.environ.get(variable) == ""
    }
    return {name: value for name, value in values.items() if name not in withheld}


def _private_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}.secrets.yaml")


def secret_environment(config: RootConfig) -> dict[str, str]:
    """Return the environment variables that pass the configuration's secrets to a child process."""
    values = values_of(config)
    given = ((variable, values[name].complete) for name, variable in SECRET_ENVIRONMENT.items())
    return {variable: value for variable, value in given if value is not None}


def _fill_from_environment(sections: dict[str, dict[str, Any]]) -> None:
    for name, variable in SECRET_ENVIRONMENT.items():
        section = sections[SETTINGS[name].section]
        if name not in section and os.environ.get(variable):
            section[name] = os.environ[variable]


def _check_only_value(name: str, value: Any) -> None:
    allowed, reason = ONE_VALUE[name]
    if str(value).lower() != allowed:
        raise ConfigError(f"--{name} {str(value).lower()}: {reason}")


def _expand_shorthand(name: str, value: Any, sections: dict[str, dict[str, Any]]) -> None:
    flag, meaning = SHORTHANDS[name]
    section = sections[SETTINGS[flag].section]
    try:
        is_on = TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise ConfigError(f"--{name}: Input should be a valid boolean, got {value!r}") from None
    given = section.get(flag, "auto")
    if is_on and given == "auto":
        section[flag] = meaning
    elif is_on and name == "sync_sampling" and str(given) != meaning:
        raise ConfigError(f"--{name} means --{flag} {meaning}, not {given}; remove one of the two")


def _join_optim_args(parts: Mapping[str, Any], trainer: dict[str, Any]) -> None:
    """Write AdamW's arguments, given one by one, as `--optim_args`."""
    if "optim_args" in trainer:
        raise ConfigError(
            f"--{next(iter(parts))} and --optim_args are mutually exclusive; give one"
        )
    named = (f"{OPTIM_PARTS[name]}={value}" for name, value in parts.items())
    trainer["optim_args"] = ",".join(named)


def _convert(name: str, value: Any) -> Any:
    """Convert a typed value, or a value from YAML, to the type that its field expects."""
    flag = SETTINGS[name]
    if not isinstance(value, str):
        return _checked_kind(flag, value)
    if _HOME.match(value):  # not expanded by a shell after `=`, nor in a file
        expanded = os.path.expanduser(value)
        if expanded == value:
            raise ConfigError(
                f"{flag.typed} {value}: no user of this name has a home directory here"
            )
        value = expanded
    if flag.is_tuple:
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if flag.is_mapping:
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            name = value.partition("=")[0].strip() if "=" in value else "NAME"
            example = f"write '{{\"{name}\": VALUE}}'"
            raise ConfigError(f"{flag.typed} is not valid JSON: {error}; {example}") from None
        except RecursionError:
            raise ConfigError(f"{flag.typed}: nested too deeply") from None
    if value.lower() in ("none", "null") and not flag.field.is_required():
        return flag.field.default if flag.field.default is None else value
    if not value and flag.is_path:
        kind = "folder" if name.endswith("_dir") else "file"
        raise ConfigError(f"{flag.typed} is empty: give a {kind}, or remove the flag")
    return value


def _checked_kind(flag: Flag, value: Any) -> Any:
    """Refuse a YAML value that its field would misinterpret."""
    if isinstance(value, bool) and not flag.is_bool:
        if not value and "no" in flag.choices:
            return "no"  # YAML parses `no` as false
        raise ConfigError(f"{flag.typed}: Input should not be a boolean, got {str(value).lower()}")
    if flag.is_text and isinstance(value, int | float | date):
        raise ConfigError(f"{flag.typed}: quote it as text: {flag.name}: '{value}'")
    return value


def _apply_preferred_sampling(config: RootConfig) -> RootConfig:
    preferred = config.sampling.preferred_sampling_params
    if not preferred:
        return config
    allowed = set(type(config.sampling).model_fields) - {"preferred_sampling_params"}
    unknown = sorted(set(preferred) - allowed)
    if unknown:
        raise ConfigError(
            f"--preferred_sampling_params: unknown key {unknown[0]!r}; known: "
            f"{', '.join(sorted(allowed))}"
        )
    # Without the defaults, which would look like given values.
    given = config.sampling.model_dump(exclude_unset=True)
    merged = given | preferred | {"preferred_sampling_params": None}
    try:
        sampling = type(config.sampling).model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None
    return config.model_copy(update={"sampling": sampling})


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    given = first.get("input")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    name = first["loc"][-1] if first["loc"] else "configuration"
    for part in first["loc"]:
        if part in SETTINGS:
            name = part
    flag = SETTINGS.get(str(name))
    typed = f"--{name}" if flag is None else flag.typed
    if flag is not None and flag.is_secret:
        return f"{typed}: {first['msg']}{more}"
    choices = () if flag is None else flag.choices
    if first["type"] == "literal_error" and choices:
        by_lower_case = {choice.lower(): choice for choice in choices}
        similar = get_close_matches(str(given).lower(), by_lower_case, n=1)
        hint = f"; did you mean {by_lower_case[similar[0]]}?" if similar else ""
        return f"{typed} {given} is not known{hint} (known: {', '.join(choices)}){more}"
    return f"{typed}: {first['msg']}, got {given!r}{more}"
