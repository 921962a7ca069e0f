"""The flat flag table: which section each flag belongs to, its aliases, and what has no effect."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from agentrl.config.sections import SECTIONS

ALIASES = {
    "loss_calculater": "loss_calculator",
    "mcp_servers_config": "mcp_servers",
    "db_uri": "db_connection_string",
}
"""Other names of a flag: the original AgentRL's spelling is accepted everywhere."""

_PACKED = "turns are always packed without padding"
_STREAMED = "the trainer streams from the store and has no data loader"
NO_EFFECT = {
    "accelerator_config": "batches are planned over all ranks together",
    "bypass_causal_mask_check": "masks are built from the token tree",
    "compress_history": "contexts are never rewritten silently; see --new_context",
    "dataloader_drop_last": _STREAMED,
    "dataloader_num_workers": _STREAMED,
    "dataloader_prefetch_factor": _STREAMED,
    "dynamic_batching": _PACKED,
    "enable_loss_parallel": "it follows --tp_size",
    "pad_to_maximum": _PACKED,
    "pad_to_multiple_of": _PACKED,
    "remove_unused_columns": _STREAMED,
    "shift_labels": "targets are always the next token",
}
"""Flags of the original that are accepted and change nothing, with the reason."""


@dataclass(frozen=True)
class Flag:
    """One flag: its section, its field and the field's description."""

    name: str
    section: str
    field: FieldInfo

    @property
    def is_bool(self) -> bool:
        """Whether the flag may stand without a value."""
        return self.field.annotation is bool

    @property
    def is_tuple(self) -> bool:
        """Whether the flag takes a comma-separated list."""
        return getattr(self.field.annotation, "__origin__", None) is tuple

    @property
    def is_path(self) -> bool:
        """Whether the flag names a file or a directory."""
        return Path in (self.field.annotation, *get_args(self.field.annotation))

    @property
    def is_mapping(self) -> bool:
        """Whether the flag takes a JSON object."""
        kinds = (self.field.annotation, *get_args(self.field.annotation))
        return any(getattr(kind, "__origin__", None) is dict for kind in kinds)

    @property
    def help(self) -> str:
        """The field's docstring with its default."""
        default: Any = self.field.default
        text = " ".join((self.field.description or "").split())
        return text if default is None or default == () else f"{text} [{default}]"


FLAGS: dict[str, Flag] = {
    name: Flag(name, section, field)
    for section, cls in SECTIONS.items()
    for name, field in cls.model_fields.items()
}


def canonical_name(flag: str) -> str:
    """Return the field name behind a flag as typed (`--max-steps` -> `max_steps`)."""
    name = flag.lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)


def nearest_name(name: str) -> str | None:
    """Return the known flag that a misspelt one most resembles, if any does."""
    known = [*FLAGS, *ALIASES, *NO_EFFECT]
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return matches[0] if matches else None
