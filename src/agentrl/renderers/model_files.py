"""The files of a model directory that decide how text becomes tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.errors import ConfigError

_CODE_NAMES = ("auto_map", "processor_class")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class ModelFiles:
    """The contents of these files."""

    tokenizer: Tokenizer
    tokenizer_json: str
    chat_template: str
    named_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... as the template may use them."""
    stop_token_ids: tuple[int, ...]
    image_token_id: int | None
    """Placeholder of an image in the template's text, if the model's configuration names one."""
    image_processor: dict[str, Any]
    """Settings of the model's image processor; empty for models without."""
    name: str
    """Name of the directory."""


def read_model_files(model_dir: str | Path, *, chat_template: str | None = None) -> ModelFiles:
    """Read tokenizer, chat template and end-of-turn ids of a model directory."""
    path = Path(model_dir)
    if not path.is_dir():
        raise ConfigError(f"model path {path}: no such directory")
    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ConfigError(f"model path {path}: tokenizer.json is missing")
    tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise ConfigError(f"{tokenizer_path}: not a tokenizer ({error})") from error
    config = _read_json(path / "tokenizer_config.json")
    named_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
    template = _chat_template(path, config) if chat_template is None else chat_template
    stop_ids = stop_token_ids(path, tokenizer)
    if not stop_ids:
        raise ConfigError(f"model path {path}: no file names an end-of-turn token (eos_token)")
    return ModelFiles(
        tokenizer=tokenizer,
        tokenizer_json=tokenizer_json,
        chat_template=template,
        named_tokens=named_tokens,
        stop_token_ids=stop_ids,
        image_token_id=image_placeholder(path),
        image_processor=image_processor(path),
        name=path.name,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(path: Path, config: dict[str, Any]) -> str:
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {entry.get("name"): entry.get("template") for entry in template}
        template = templates.get("tool_use") or templates.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"model path {path}: no chat template (neither chat_template.jinja nor "
            "`chat_template` in tokenizer_config.json); give one with --chat_template FILE, or "
            "use the model's instruction-tuned version"
        )
    return template


def image_placeholder(path: Path) -> int | None:
    """Return the token that a model's template writes for an image; None for a text-only model."""
    config = _read_json(path / "config.json")
    # Gemma 3's template writes the token that opens an image; the image's own token follows it.
    names = ("boi_token_index",) if config.get("model_type") == "gemma3" else ()
    named = (config.get(name) for name in (*names, "image_token_id", "image_token_index"))
    return next((value for value in named if isinstance(value, int)), None)


def image_processor(path: Path) -> dict[str, Any]:
    """Return the settings of a model's image processor; empty if its directory has none."""
    settings = _read_json(path / "preprocessor_config.json")
    nested = _read_json(path / "processor_config.json").get("image_processor")
    if not settings and isinstance(nested, dict):
        settings = nested
    # The checkpoint's own code is not run; the remaining settings define how pixels are computed.
    return {name: settings[name] for name in sorted(settings) if name not in _CODE_NAMES}


def stop_token_ids(path: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end a turn, by the files that name some."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        found.extend([value] if isinstance(value, int) else value or [])
    eos_token = _token_text(_read_json(path / "tokenizer_config.json").get("eos_token"))
    eos_id = tokenizer.token_to_id(eos_token) if tokenizer is not None and eos_token else None
    return tuple(dict.fromkeys(found if eos_id is None else [*found, eos_id]))
