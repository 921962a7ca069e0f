"""The table of flags: every field of every section is one flag of the same name.

This module knows names, types and help texts. It parses nothing (`command_line`) and checks no
values (`loading`, `checks`). It also knows the names of other projects' flags: the original AgentRL,
Hugging Face, TRL, verl, prime-rl, vLLM. An alias is a flag with exactly the same meaning. A flag with
a different meaning is never accepted silently: `ELSEWHERE` names its replacement.
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
    SecretRoutes,
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
    SecretRoutes: "JSON",
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
        return self._kind in (dict, SecretRoutes)

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
    """Return the known flag that a misspelled one most resembles, if any does."""
    known = [*FLAGS, *ALIASES, *NO_EFFECT, *ONE_VALUE, *OPTIM_PARTS, *SHORTHANDS]
    # Below this similarity, names share a word but differ in meaning: `batch_size` and `tp_size`.
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return matches[0] if matches else None


def unknown_flag(name: str) -> str:
    """Return the message about a flag that does not exist."""
    explanation = elsewhere(name)
    if explanation is not None:
        return f"--{name}: {explanation}"
    nearest = nearest_name(name)
    hint = f"; did you mean --{nearest}?" if nearest else "; see --help"
    return f"unknown flag --{name}{hint}"


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

SHORTHANDS = {"bf16": ("torch_dtype", "bfloat16")}
"""Switches of the original AgentRL -> the flag and the value that they stand for. A value other
than `auto` given with the flag itself takes precedence."""

_PACKED = "turns are always packed without padding"
_STREAMED = "the trainer streams from the store and has no data loader"
_IN_MONGODB = "everything is in MongoDB, large objects too"
_PLANNED = "forward passes are planned by --max_tokens"
_SAVED_ONCE = "each rank writes its own part of a checkpoint, as safetensors"
_SCORED = "evaluations are rollouts that scorers score (--eval_file)"
_LOGGED = "every process writes its own log file (--logs_dir), and metrics go to --report_to"
NO_EFFECT = {
    **dict.fromkeys(("group_by_length", "length_column_name", "train_sampling_strategy"), _PACKED),
    **dict.fromkeys(("auto_find_batch_size", "torch_empty_cache_steps"), _PLANNED),
    **dict.fromkeys(("save_on_each_node", "save_safetensors"), _SAVED_ONCE),
    **dict.fromkeys(
        (
            *("batch_eval_metrics", "eval_accumulation_steps", "eval_do_concat_batches"),
            *("eval_use_gather_object", "include_for_metrics", "include_inputs_for_metrics"),
            *("prediction_loss_only", "use_legacy_prediction_loop"),
        ),
        _SCORED,
    ),
    **dict.fromkeys(
        (
            *("disable_tqdm", "include_num_input_tokens_seen", "include_tokens_per_second"),
            *("log_level", "log_level_replica", "log_on_each_node", "logging_first_step"),
            *("logging_nan_inf_filter", "skip_memory_metrics"),
        ),
        _LOGGED,
    ),
    "accelerator_config": "batches are planned over all ranks together",
    "average_tokens_across_devices": "losses are averaged over the tokens of all ranks",
    "bypass_causal_mask_check": "masks are built from the token tree",
    "compress_history": "contexts are never rewritten silently; see --new_context",
    "dataloader_drop_last": _STREAMED,
    "dataloader_num_workers": _STREAMED,
    "dataloader_pin_memory": _STREAMED,
    "dataloader_prefetch_factor": _STREAMED,
    "dynamic_batching": _PACKED,
    "enable_loss_parallel": "controlled by --tp_size",
    "enable_oss": _IN_MONGODB,
    "ignore_data_skip": "a resumed run continues with the questions that are left",
    "label_names": "the targets are the tokens that the model sampled",
    "mp_parameters": "unused outside of SageMaker",
    "oss_connection_string": _IN_MONGODB,
    "pad_to_maximum": _PACKED,
    "pad_to_multiple_of": _PACKED,
    "past_index": "no past states are fed back",
    "remove_experience": "unused in the original as well",
    "remove_unused_columns": _STREAMED,
    "restore_callback_states_from_checkpoint": "there are no callbacks",
    "shift_labels": "targets are always the next token",
    "trainer": "the model type is read from the checkpoint's config.json",
    "tune_vision": "unused in the original as well",
    "use_cache": "the trainer's forward passes keep no cache",
}
"""Flags of the original AgentRL that are accepted and change nothing -> why. Its flags include those of
Transformers' `TrainingArguments`."""

ONE_VALUE = {
    "cpu_ram_efficient_loading": ("true", "every rank reads only its own parts; remove it"),
    "output_router_logits": ("false", "there is no router loss; see --router_replay"),
    "resume_from_checkpoint": (
        "true",
        "a run resumes from its newest checkpoint when it is started again with the same "
        "--run_name and --output_dir; --fresh starts over, and the checkpoint of another run can "
        "be given as --model_name_or_path",
    ),
}
"""Flags of the original AgentRL with one possible value -> that value, and why no other is."""

_GROUPS = (
    "the size of a step is counted in groups: --groups_per_step N questions with --num_generations "
    "rollouts each; --max_tokens per forward pass limits memory"
)
_QUESTIONS = (
    "--train_file takes a file, a folder or a Hugging Face dataset (owner/name@config:split), and "
    "--eval_file the held-out questions"
)
_RANKS = (
    "--trainer_gpus 0-3 and --inference_gpus 4-7 assign a machine's GPUs to the trainer's ranks "
    "and the servers; --num_processes is the number of ranks"
)
_MACHINES = "start the trainer's ranks on each machine with torchrun (docs/deploy.md)"
_SERVERS = (
    "rollouts run on inference servers: --inference_backend sglang, with --inf_tp_size, "
    "--inf_mem_ratio and --sglang_args"
)
_SHARDED = (
    "several ranks (--num_processes) are sharded with FSDP2; --cpu_offload and "
    "--gradient_checkpointing save memory"
)
_CLIP_RANGE = (
    "the clip range is 1 - epsilon to 1 + epsilon + epsilon_higher: give --epsilon and "
    "--epsilon_higher (0 for a symmetric range)"
)
_CLIP_HIGH = (
    "this is an absolute bound, while --epsilon_higher is added to --epsilon: for 0.28 with "
    "--epsilon 0.2 give --epsilon_higher 0.08"
)
_SCORES = (
    "--scorer_module FILE registers scoring functions, and --default_scorer selects the one for "
    "questions that name none"
)
_EQUAL_SCORES = (
    "groups with equal scores are dropped and replaced (--min_score_spread); "
    "--repeat_equal_probability 0.5 repeats their questions less often in later epochs"
)
_HUB = (
    "nothing is uploaded automatically; after the run: hf upload OWNER/NAME "
    "output/NAME/checkpoints/STEP/model"
)
_REUSE = (
    "--max_trained_count is the number of steps that may use a record, at least "
    "--retrained_interval steps apart"
)
_LENGTH = (
    "--max_new_tokens limits one model call, and --max_prompt_tokens the conversation before it, "
    "including tool results"
)
_NO_QUANTIZATION = (
    "weights are not quantized; --lora_rank 16 with --torch_dtype bfloat16 saves memory"
)
_TRACKER = (
    "trackers (--report_to) read their own environment variables, such as WANDB_PROJECT or "
    "SWANLAB_PROJECT"
)
_UNCHANGED = (
    "logprobs must be reproducible, so the model and its targets are used unchanged; remove it"
)
_OPTIMIZER = (
    "the optimizer is AdamW: set --learning_rate, --weight_decay and --optim_args "
    "beta1=0.9,beta2=0.98,eps=1e-8"
)
_CHECKPOINTS = "a checkpoint is written every --save_steps steps and at the end"
_BEST = "--save_total_limit sets how many checkpoints are kept; compare them with `agentrl eval`"
_PRECISION = "give --torch_dtype bfloat16 or float32; float16 training is not supported"
_DEVICE = "available GPUs are used; CUDA_VISIBLE_DEVICES= hides them"
_CHUNKED = "the loss is always computed in chunks of --loss_seq_chunk_size"
_ONLY_SWITCH = "only --gradient_checkpointing true is supported"
_ROLLOUTS_AT_A_TIME = "--max_concurrent_samples_per_process is the number of rollouts at a time"
_LOSS = (
    "--recipe grpo, dapo, dr_grpo, gspo or cispo selects the whole objective of a paper; its parts "
    "are --loss_calculator (GRPO, MINIRL, GSPO, CISPO or REINFORCE) and --token_level_loss, which "
    "selects the averaging"
)
ELSEWHERE = {
    **dict.fromkeys(("adafactor", "optim", "optim_target_modules"), _OPTIMIZER),
    **dict.fromkeys(
        (
            *("bf16_full_eval", "fp16", "fp16_backend", "fp16_full_eval", "fp16_opt_level"),
            *("half_precision_backend", "tf32"),
        ),
        _PRECISION,
    ),
    **dict.fromkeys(
        ("eval_batch_size", "per_device_eval_batch_size", "per_gpu_eval_batch_size"),
        _ROLLOUTS_AT_A_TIME,
    ),
    **dict.fromkeys(("enable_jit_checkpoint", "save_strategy"), _CHECKPOINTS),
    **dict.fromkeys(
        ("greater_is_better", "load_best_model_at_end", "metric_for_best_model"), _BEST
    ),
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), _ONLY_SWITCH
    ),
    **dict.fromkeys(("jit_mode_eval", "torchdynamo"), "give --torch_compile true"),
    **dict.fromkeys(("label_smoothing_factor", "neftune_noise_alpha"), _UNCHANGED),
    **dict.fromkeys(("liger_kernel_config", "use_liger_kernel"), _CHUNKED),
    **dict.fromkeys(("no_cuda", "use_cpu", "use_mps_device"), _DEVICE),
    **dict.fromkeys(("project", "wandb_project"), _TRACKER),
    "activation_checkpointing": "use --gradient_checkpointing",
    "adv_estimator": "use --advantage_estimator leave_one_out (RLOO), group_mean, group_std "
    "(GRPO) or reinforce_plus_plus",
    "batch_size": _GROUPS,
    "clip_ratio": _CLIP_RANGE,
    "clip_ratio_high": _CLIP_HIGH,
    "clip_ratio_low": _CLIP_RANGE,
    "data": _QUESTIONS,
    "data_path": _QUESTIONS,
    "dataset": _QUESTIONS,
    "dataset_config": _QUESTIONS,
    "dataset_name": _QUESTIONS,
    "dataset_split": _QUESTIONS,
    "dataset_train_split": _QUESTIONS,
    "data_seed": "--seed also determines the order of the questions",
    "decoder_sparse_step": "the layers with experts are read from the checkpoint's config.json",
    "deepspeed": _SHARDED,
    "do_eval": "use --eval_strategy, with --eval_file",
    "debug": "a step whose loss or gradient is not finite is left out, and reported",
    "do_predict": "`agentrl run` trains, `agentrl eval` evaluates",
    "do_train": "`agentrl run` trains, `agentrl eval` evaluates",
    "eval_delay": "give --eval_strategy ends: before the first and after the last step",
    "entropy_coef": "there is no entropy bonus; a higher --epsilon_higher preserves entropy",
    "entropy_coeff": "there is no entropy bonus; a higher --epsilon_higher preserves entropy",
    "epsilon_high": _CLIP_HIGH,
    "epsilon_low": _CLIP_RANGE,
    "eval_on_start": "give --eval_strategy ends: before the first and after the last step",
    "filter_groups": _EQUAL_SCORES,
    "fsdp": _SHARDED,
    "generation_batch_size": _GROUPS,
    "gpu_memory_utilization": _SERVERS,
    "gpus": _RANKS,
    "importance_sampling_level": "for token use --loss_calculator GRPO, for sequence GSPO",
    "kl_coef": "the KL penalty is part of the loss, not of the reward: --kl_coefficient",
    "load_in_4bit": _NO_QUANTIZATION,
    "load_in_8bit": _NO_QUANTIZATION,
    "local_rank": _RANKS,
    "log_completions": "all rollouts are stored; see `agentrl inspect records`",
    "logging_strategy": "give --logging_steps",
    "logging_dir": "--logs_dir is the directory of the log files; "
    "--report_to tensorboard writes to --output_dir",
    "lora_dropout": "adapters have no dropout, because logprobs must be reproducible; remove it",
    "loss_type": _LOSS,
    "lr_scheduler_kwargs": "--lr_scheduler_type constant, linear and cosine take no arguments besides "
    "--warmup_steps and --max_steps",
    "machine_rank": _MACHINES,
    "main_process_ip": _MACHINES,
    "main_process_port": _MACHINES,
    "mask_truncated_completions": "give --reserve_context_error_count 0",
    "max_completion_length": _LENGTH,
    "max_length": _LENGTH,
    "max_pixels": "image sizes are read from the model's preprocessor_config.json; "
    "--max_images and --max_image_megabytes set the limits",
    "max_prompt_length": "questions are never truncated; " + _LENGTH,
    "max_response_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_tool_calling_iterations": "use --max_turns, the number of model calls, which is one more",
    "micro_batch_size": _GROUPS,
    "mini_batch_size": _GROUPS,
    "nnodes": _MACHINES,
    "nproc_per_node": _RANKS,
    "num_iterations": _REUSE,
    "num_machines": _MACHINES,
    "online_difficulty_filtering": _EQUAL_SCORES,
    "overwrite_output_dir": "give --fresh --delete_existing, which also deletes the run's database",
    "parallelism_config": "--tp_size, --cp_size, --ep_size, --pp_size and --dp_replicate_size are the mesh",
    "ppo_epochs": _REUSE,
    "ppo_mini_batch_size": _GROUPS,
    "push_to_hub": _HUB,
    "quantization": _NO_QUANTIZATION,
    "ray_scope": "there is no search for settings; start one run per setting",
    "ref_model": "use --reference_model, the model of the KL penalty (--kl_coefficient)",
    "reward_func": _SCORES,
    "reward_funcs": _SCORES,
    "reward_function": _SCORES,
    "reward_model": _SCORES,
    "reward_weights": _SCORES + "; a scorer may combine several rewards itself",
    "rollout_batch_size": _GROUPS,
    "rollout_n": "give --num_generations",
    "scale_rewards": "--advantage_estimator group_std divides by the standard deviation of "
    "the group; leave_one_out (the default) and group_mean do not",
    "steps_per_generation": "use --max_staleness, the maximum age of a sample in steps",
    "sync_ref_model": "the reference model is fixed (--reference_model, --kl_coefficient)",
    "tensor_model_parallel_size": "--tp_size splits the trainer's model, --inf_tp_size a server's",
    "tensor_parallel_size": "--tp_size splits the trainer's model, --inf_tp_size a server's",
    "test_freq": "give --eval_strategy steps --eval_steps N",
    "tools": "configure tools with --mcp_servers FILE, --mcp_manager_url or --tool_server_command",
    "train_batch_size": _GROUPS,
    "train_dataset": _QUESTIONS,
    "use_peft": "give --lora_rank 16",
    "use_vllm": _SERVERS,
    "warmup_ratio": "give --warmup_steps, a number of steps",
}
"""Naming whose meaning differs from the nearest flag -> the flag to use, and how."""

_PREFIXES = {
    "dataloader_": _STREAMED + "; remove it",
    "ddp_": "DDP is not used: ranks form a mesh (--dp_replicate_size and FSDP2); remove it",
    "fsdp_": _SHARDED,
    "hub_": _HUB,
    "push_to_hub_": _HUB,
    "torch_compile_": "give --torch_compile true, which takes no further settings",
    "tpu_": _DEVICE,
    "trackio_": _TRACKER,
    "vllm_": _SERVERS,
}
"""Prefixes of such names -> the replacement."""


def elsewhere(name: str) -> str | None:
    """Return the replacement of another trainer's flag; None for unknown names.

    Args:
        name: as typed, without dashes; of a dotted one (`actor_rollout_ref.actor.optim.lr`) the
            last part is looked up.
    """
    last = name.rpartition(".")[2]
    if last != name and last in ALIASES:
        return f"flags have no dots here: --{ALIASES[last]}"
    by_prefix = (text for prefix, text in _PREFIXES.items() if last.startswith(prefix))
    return ELSEWHERE.get(last) or next(by_prefix, None)
