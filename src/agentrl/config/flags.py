"""The table of settings: every field of every section is one, and most are flags of the same name.

This module knows names, types and help texts. It parses nothing (`command_line`) and checks no
values (`loading`, `checks`). A name of another project is accepted if it means exactly the same as a flag
here (`ALIASES`); docs/coming-from.md has the others.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from agentrl.config.own_function import OWN_FUNCTION_FLAGS, REFERENCE, BuiltInOr
from agentrl.config.secrets import (
    SECRET_TYPES,
    SecretCommand,
    SecretRoute,
    SecretServers,
    SecretUrl,
)
from agentrl.config.sections import SECTIONS
from agentrl.config.value_kinds import Naming, named_by

USUAL = (
    *("run_name", "model_name_or_path", "lora_rank", "train_file", "eval_file", "env"),
    *("num_generations", "max_new_tokens", "max_turns", "scorer_module"),
    *("mcp_servers", "tool_server_command", "agent", "inference_backend", "inference_gpus"),
    *("loss_calculator", "max_steps", "groups_per_step", "learning_rate", "trainer_gpus"),
)
"""Common flags: `--help` shows them first; `--help-all` shows all others, too."""

_VALUE_NAMES: dict[Any, str] = {
    bool: "",
    int: "N",
    float: "X",
    str: "TEXT",
    Path: "PATH",
    SecretStr: "SECRET",
    SecretUrl: "URL",
    SecretCommand: "COMMAND",
    SecretServers: "TEXT",
    SecretRoute: "JSON",
    dict: "JSON",
    tuple: "A,B,...",
}


@dataclass(frozen=True)
class Flag:
    """One flag: its section, its field and the type of its values."""

    name: str
    section: str
    field: FieldInfo

    @property
    def typed(self) -> str:
        """The setting as a user writes it: a flag, or a line of a file."""
        is_flag = self.name not in ADVANCED or self.name in ORIGINAL
        return f"--{self.name}" if is_flag else f"advanced: {self.name}"

    @property
    def is_bool(self) -> bool:
        """Whether the flag may be given without a value."""
        return self._kind is bool

    @property
    def is_tuple(self) -> bool:
        """Whether the flag takes a comma-separated list."""
        return self._kind is tuple

    @property
    def is_path(self) -> bool:
        """Whether the flag names a file or a directory."""
        return self._kind is Path

    @property
    def is_text(self) -> bool:
        """Whether the flag takes any text."""
        return self._kind is str

    @property
    def is_mapping(self) -> bool:
        """Whether the flag takes a JSON object."""
        return self._kind in (dict, SecretRoute)

    @property
    def is_secret(self) -> bool:
        """Whether the value, or part of it, is a secret."""
        return isinstance(self._kind, type) and issubclass(self._kind, SECRET_TYPES)

    @property
    def names(self) -> Naming:
        """What the flag's values name."""
        return named_by(self.field)

    def is_plain(self, value: Any) -> bool:
        """Return whether a value names nothing, or nothing but what the default names."""
        return value is None or value == self.field.default or self.names.is_plain(value)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help texts: its choices, or its type."""
        own = (REFERENCE,) if self.name in OWN_FUNCTION_FLAGS else ()
        return "|".join((*self.choices, *own)) or _VALUE_NAMES[self._kind]

    @property
    def choices(self) -> tuple[str, ...]:
        """The named values that the flag accepts, if any."""
        for annotation in self.field.metadata:
            if isinstance(annotation, BuiltInOr):
                return annotation.names
        return get_args(self._type) if get_origin(self._type) is Literal else ()

    @property
    def description(self) -> str:
        """The field's docstring."""
        return " ".join((self.field.description or "").split())

    @property
    def default(self) -> str:
        """The default as it would be typed; empty if there is none."""
        default: Any = self.field.default
        if default is None:
            return ""
        if isinstance(default, tuple):
            return ",".join(default)
        return str(default).lower() if self.is_bool else str(default)

    @property
    def help(self) -> str:
        """The description with the default."""
        return f"{self.description} [{self.default}]" if self.default else self.description

    @property
    def _type(self) -> Any:
        """The field's type without `None`."""
        alternatives = get_args(self.field.annotation)
        return alternatives[0] if type(None) in alternatives else self.field.annotation

    @property
    def _kind(self) -> Any:
        """The field's type without parameters: `dict` for `dict[str, str] | None`."""
        return get_origin(self._type) or self._type


SETTINGS: dict[str, Flag] = {
    name: Flag(name, section, field)
    for section, cls in SECTIONS.items()
    for name, field in cls.model_fields.items()
}
ADVANCED = frozenset(name for cls in SECTIONS.values() for name in cls.__base__.model_fields)  # type: ignore[union-attr]
"""Settings of `sections.tuning`, which a file sets under `advanced:`."""
FLAGS = {name: flag for name, flag in SETTINGS.items() if name not in ADVANCED}
ORIGINAL = (
    *("model_name", "attention_implementation", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "enable_sampling", "target_concurrency"),
    *("repetition_early_stop_times", "enable_repetition_compress", "new_context"),
    *("resample_error_records", "mcp_server_name", "mcp_auth_token", "inf_ep_size"),
    *("tool_call_parser", "beta1", "beta2", "importance_weight_cap_ratio", "strict_in_bound"),
    *("out_of_date_decay", "adv_scaling", "balance_sample", "min_turns"),
    *("reserve_context_error_count", "efficient_rewarding", "max_trained_count"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("weight_decay", "optim_args", "max_grad_norm", "loss_seq_chunk_size", "log_entropy"),
    *("activation_offloading", "save_total_limit", "full_determinism", "save_only_model"),
    *("logging_steps", "eval_steps", "preferred_sampling_params", "token_level_loss"),
    *("skip_length_normalization", "drop_zero_advantage", "skip_non_positive_advantage"),
    "minimal_advantage",
)
"""Flags of the original AgentRL among the advanced settings: still accepted, and not in the help."""


def canonical_name(flag: str) -> str:
    """Return the field name behind a flag as typed (`--max-steps` -> `max_steps`)."""
    name = flag.lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)


def nearest_name(name: str) -> str | None:
    """Return the known flag that a misspelled one most resembles, if any does."""
    known = [*FLAGS, *ORIGINAL, *ALIASES, *NO_EFFECT, *ONE_VALUE, *OPTIM_PARTS, *SHORTHANDS]
    # Below this similarity, names share a word but differ in meaning: `batch_size` and `tp_size`.
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return matches[0] if matches else None


def unknown_flag(name: str) -> str:
    """Return the message about a flag that does not exist."""
    if name in ADVANCED:
        return f"--{name} is not a flag; set it in a file: --config FILE, with {name} below `advanced:`"
    if name == "scorer":
        return "unknown flag --scorer; --scorer_module FILE.py registers scorers, and --default_scorer NAME selects one"
    nearest = nearest_name(name.rpartition(".")[2])
    hint = f"did you mean --{nearest}?" if nearest else "see --help;"
    return f"unknown flag --{name}; {hint} docs/coming-from.md has the flags of other projects"


ALIASES = {
    "loss_calculater": "loss_calculator",
    "mcp_servers_config": "mcp_servers",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "db_uri": "db_connection_string",
    "lr": "learning_rate",
    "beta": "kl_coefficient",
    "kl_loss_coef": "kl_coefficient",
    "grad_clip": "max_grad_norm",
    "lr_scheduler": "lr_scheduler_type",
    "epochs": "num_train_epochs",
    "total_epochs": "num_train_epochs",
    "total_training_steps": "max_steps",
    "save_freq": "save_steps",
    "group_size": "num_generations",
    "n_samples_per_prompt": "num_generations",
    "rollouts_per_example": "num_generations",
    "num_rollouts": "num_generations",
    "mcp_config": "mcp_servers",
    "model": "model_name_or_path",
    "model_path": "model_name_or_path",
    "attn_implementation": "attention_implementation",
    "lora_r": "lora_rank",
    "max_model_len": "context_length",
    "n_gpus_per_node": "num_gpus",
    "train_files": "train_file",
    "val_files": "eval_file",
    "num_generations_eval": "eval_num_generations",
}
"""Other spellings of a flag, accepted everywhere; the first is the original AgentRL's."""

OPTIM_PARTS = {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "eps"}
"""Hugging Face's names of AdamW's arguments -> their names in `--optim_args`."""

SHORTHANDS = {"bf16": ("torch_dtype", "bfloat16"), "sync_sampling": ("max_staleness", "0")}
"""Switches of the original AgentRL -> the flag and the value that they stand for. A precision
given with `--torch_dtype` takes precedence; another staleness is an error."""

_PACKED = "turns are always packed without padding"
_STREAMED = "the trainer streams from the store and has no data loader"
_IN_MONGODB = "everything is in MongoDB, large objects too"
NO_EFFECT = {
    "accelerator_config": "batches are planned over all ranks together",
    "bypass_causal_mask_check": "masks are built from the token tree",
    "compress_history": "contexts are never rewritten silently; see --new_context",
    "dataloader_drop_last": _STREAMED,
    "dataloader_num_workers": _STREAMED,
    "dataloader_prefetch_factor": _STREAMED,
    "dynamic_batching": _PACKED,
    "enable_loss_parallel": "controlled by --tp_size",
    "enable_oss": _IN_MONGODB,
    "oss_connection_string": _IN_MONGODB,
    "pad_to_maximum": _PACKED,
    "pad_to_multiple_of": _PACKED,
    "remove_experience": "unused in the original as well",
    "remove_unused_columns": _STREAMED,
    "shift_labels": "targets are always the next token",
    "trainer": "the model type is read from the checkpoint's config.json",
    "tune_vision": "unused in the original as well",
}
"""Flags of the original AgentRL that are accepted and change nothing -> why."""

ONE_VALUE = {
    "cpu_ram_efficient_loading": ("true", "every rank reads only its own parts; remove it"),
    "output_router_logits": ("false", "there is no router loss; see --router_replay"),
    "resume_from_checkpoint": (
        "true",
        "a run resumes from its newest checkpoint when it is started again with the same "
        "--run_name and --output_dir; --fresh starts over, and the checkpoint of another run can "
        "be given as --model_name_or_path",
    ),
    "retrained_interval": ("1", "the uses of a record (--max_trained_count) are all in one step"),
}
"""Flags of the original AgentRL with one possible value -> that value, and why no other is."""
