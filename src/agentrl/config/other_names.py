"""Flags that people know from elsewhere: AgentRL's original, Hugging Face, TRL, verl, prime-rl, vLLM.

In goes a flag's name; out comes what to do with it. An alias stands for a flag that means exactly
the same. Whatever differs in meaning is never taken silently: `ELSEWHERE` says what does it here.
"""

ALIASES = {
    "loss_calculater": "loss_calculator",
    "mcp_servers_config": "mcp_servers",
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
than `auto` that the flag itself was given counts more."""

_PACKED = "turns are always packed without padding"
_STREAMED = "the trainer streams from the store and has no data loader"
_IN_MONGODB = "everything is in MongoDB, large objects too"
NO_EFFECT = {
    "accelerator_config": "batches are planned over all ranks together",
    "bypass_causal_mask_check": "masks are built from the token tree",
    "compress_history": "contexts are never rewritten silently; see --new_context",
    "dataloader_drop_last": _STREAMED,
    "dataloader_num_workers": _STREAMED,
    "dataloader_pin_memory": _STREAMED,
    "dataloader_prefetch_factor": _STREAMED,
    "dynamic_batching": _PACKED,
    "enable_loss_parallel": "it follows --tp_size",
    "enable_oss": _IN_MONGODB,
    "oss_connection_string": _IN_MONGODB,
    "pad_to_maximum": _PACKED,
    "pad_to_multiple_of": _PACKED,
    "remove_experience": "the original reads it nowhere",
    "remove_unused_columns": _STREAMED,
    "shift_labels": "targets are always the next token",
    "trainer": "the checkpoint's config.json says what kind of model it is",
    "tune_vision": "the original reads it nowhere",
}
"""Flags of the original AgentRL that are accepted and change nothing -> why."""

ONE_VALUE = {
    "cpu_ram_efficient_loading": ("true", "every rank reads its own parts only; leave it out"),
    "output_router_logits": ("false", "no loss is computed on routers; see --router_replay"),
    "resume_from_checkpoint": (
        "true",
        "a run resumes by itself at its newest checkpoint when it is started again with the same "
        "--run_name and --output_dir; --fresh starts anew, and a checkpoint of another run is a "
        "model for --model_name_or_path",
    ),
    "torch_compile": ("false", "models are not compiled; leave it out"),
}
"""Flags of the original AgentRL with one possible value -> that value, and why no other is."""

_GROUPS = (
    "a step is counted in groups: --groups_per_step N questions with --num_generations tries each; "
    "memory is bounded by --max_tokens a forward pass"
)
_QUESTIONS = (
    "--train_file takes a file, a folder or a data set of the hub (owner/name@config:split), and "
    "--eval_file the held-out questions"
)
_RANKS = (
    "--trainer_gpus 0-3 and --inference_gpus 4-7 divide a machine's GPUs between the trainer's ranks "
    "and the servers; --num_processes counts the ranks over all machines (--num_machines)"
)
_SERVERS = (
    "rollouts run on inference servers: --inference_backend sglang, with --inf_tp_size, "
    "--inf_mem_ratio and --sglang_args"
)
_SHARDED = (
    "several ranks (--num_processes) are sharded by FSDP2; --cpu_offload and "
    "--gradient_checkpointing save memory"
)
_CLIP_RANGE = (
    "the clip range is 1 - epsilon to 1 + epsilon + epsilon_higher: give --epsilon and "
    "--epsilon_higher (0 for a symmetric range)"
)
_CLIP_HIGH = (
    "an absolute bound elsewhere, while --epsilon_higher is extra width above --epsilon: for 0.28 "
    "with --epsilon 0.2 give --epsilon_higher 0.08"
)
_SCORES = (
    "--scorer_module FILE registers scoring functions, and --default_scorer names the one of "
    "questions that name none"
)
_EQUAL_SCORES = (
    "groups of equal scores are dropped, and others take their place (--min_score_spread); "
    "--repeat_equal_probability 0.5 asks their questions less often in later epochs"
)
_HUB = "nothing is uploaded by itself; afterwards: agentrl push_to_hub OWNER/NAME --run_name NAME"
_REUSE = (
    "--max_trained_count is the number of steps that may use a record, --retrained_interval apart"
)
_LENGTH = (
    "--max_new_tokens bounds one model call and --max_prompt_tokens the whole conversation before "
    "it, tool results included"
)
_NO_QUANTIZATION = (
    "weights are not quantized; --lora_rank 16 with --torch_dtype bfloat16 saves memory"
)
_TRACKER = "trackers (--report_to) read their own variables, as WANDB_PROJECT or SWANLAB_PROJECT"
_LOSS = (
    "--recipe grpo, dapo, dr_grpo, gspo or cispo is the whole objective of a paper; of its parts, "
    "--loss_calculator is GRPO, MINIRL, GSPO, CISPO or REINFORCE, and --token_level_loss says how it "
    "is averaged"
)
ELSEWHERE = {
    "activation_checkpointing": "it is --gradient_checkpointing here",
    "adv_estimator": "--advantage_estimator is leave_one_out (RLOO), group_mean, group_std (GRPO) or "
    "reinforce_plus_plus",
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
    "data_seed": "--seed draws the order of the questions, too",
    "decoder_sparse_step": "the checkpoint's config.json says which layers have experts",
    "deepspeed": _SHARDED,
    "do_eval": "--eval_strategy says when to evaluate, on --eval_file",
    "do_train": "`agentrl run` trains, `agentrl eval` evaluates",
    "eval_delay": "give --eval_strategy ends: before the first and after the last step",
    "entropy_coef": "no entropy bonus is added; --epsilon_higher keeps the entropy up",
    "entropy_coeff": "no entropy bonus is added; --epsilon_higher keeps the entropy up",
    "epsilon_high": _CLIP_HIGH,
    "epsilon_low": _CLIP_RANGE,
    "eval_batch_size": "--max_concurrent_samples_per_process is the number of rollouts at a time",
    "eval_on_start": "give --eval_strategy ends: before the first and after the last step",
    "filter_groups": _EQUAL_SCORES,
    "fp16": "give --torch_dtype bfloat16 or float32; float16 is not trained in",
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "generation_batch_size": _GROUPS,
    "gpu_memory_utilization": _SERVERS,
    "gpus": _RANKS,
    "gradient_checkpointing_kwargs": "--gradient_checkpointing true is all that there is to set",
    "importance_sampling_level": "token is --loss_calculator GRPO, sequence is GSPO",
    "kl_coef": "the KL penalty is part of the loss, not of the reward: --kl_coefficient",
    "load_in_4bit": _NO_QUANTIZATION,
    "load_in_8bit": _NO_QUANTIZATION,
    "load_best_model_at_end": "--save_total_limit keeps checkpoints; `agentrl eval` compares them",
    "local_rank": _RANKS,
    "log_completions": "all of them are stored; `agentrl inspect records` shows them",
    "logging_strategy": "give --logging_steps",
    "logging_dir": "--logs_dir holds the log files, and --report_to tensorboard writes below "
    "--output_dir",
    "lora_dropout": "adapters have no dropout: logprobs have to be reproducible; leave it out",
    "loss_type": _LOSS,
    "mask_truncated_completions": "give --reserve_context_error_count 0",
    "max_completion_length": _LENGTH,
    "max_length": _LENGTH,
    "max_pixels": "the model's preprocessor_config.json says how large its images get; --max_images and "
    "--max_image_megabytes bound what is taken",
    "max_prompt_length": "questions are never cut; " + _LENGTH,
    "max_response_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_tool_calling_iterations": "--max_turns is the number of model calls, so one more",
    "micro_batch_size": _GROUPS,
    "mini_batch_size": _GROUPS,
    "nnodes": _RANKS,
    "nproc_per_node": _RANKS,
    "num_iterations": _REUSE,
    "online_difficulty_filtering": _EQUAL_SCORES,
    "optim": "the optimizer is AdamW: --learning_rate, --weight_decay and --optim_args "
    "beta1=0.9,beta2=0.98,eps=1e-8",
    "overwrite_output_dir": "give --fresh --delete_existing, which also deletes the run's database",
    "per_device_eval_batch_size": "--max_concurrent_samples_per_process is the number of rollouts at "
    "a time",
    "ppo_epochs": _REUSE,
    "ppo_mini_batch_size": _GROUPS,
    "push_to_hub": _HUB,
    "quantization": _NO_QUANTIZATION,
    "ref_model": "--reference_model is the model of the KL penalty (--kl_coefficient)",
    "reward_func": _SCORES,
    "reward_funcs": _SCORES,
    "reward_function": _SCORES,
    "reward_model": _SCORES,
    "reward_weights": _SCORES + "; a scorer may add up several rewards itself",
    "rollout_batch_size": _GROUPS,
    "rollout_n": "give --num_generations",
    "save_strategy": "a checkpoint is written every --save_steps steps and at the end",
    "scale_rewards": "--advantage_estimator group_std divides by the group's deviation; leave_one_out "
    "(the default) and group_mean do not",
    "steps_per_generation": "--max_staleness says how many steps old a sample may be",
    "sync_ref_model": "the reference model stays as it is (--reference_model, --kl_coefficient)",
    "tf32": "give --torch_dtype bfloat16 or float32",
    "tensor_model_parallel_size": "--tp_size splits the trainer's model, --inf_tp_size a server's",
    "tensor_parallel_size": "--tp_size splits the trainer's model, --inf_tp_size a server's",
    "test_freq": "give --eval_strategy steps --eval_steps N",
    "tools": "--mcp_servers FILE, --mcp_manager_url or --tool_server_command names the tools",
    "train_batch_size": _GROUPS,
    "train_dataset": _QUESTIONS,
    "use_cpu": "GPUs are used where there are any; CUDA_VISIBLE_DEVICES= hides them",
    "use_liger_kernel": "the loss is computed in parts of --loss_seq_chunk_size already",
    "use_peft": "give --lora_rank 16",
    "use_vllm": _SERVERS,
    "wandb_project": _TRACKER,
    "warmup_ratio": "give --warmup_steps, a number of steps",
}
"""Names that mean something else than the nearest flag here -> which flag does it, and how."""

_FAMILIES = {
    "dataloader_": _STREAMED + "; leave it out",
    "ddp_": "ranks form a mesh (--dp_replicate_size and FSDP2), not DDP; leave it out",
    "hub_": _HUB,
    "torch_compile_": ONE_VALUE["torch_compile"][1],
    "vllm_": _SERVERS,
}
"""Beginnings of such names -> the same."""


def elsewhere(name: str) -> str | None:
    """Return what does here what a flag of another trainer does there; None for unknown names.

    Args:
        name: as typed, without dashes; of a dotted one (`actor_rollout_ref.actor.optim.lr`) the
            last part is looked up.
    """
    last = name.rpartition(".")[2]
    if last != name and last in ALIASES:
        return f"flags have no dots here: --{ALIASES[last]}"
    whole_family = (text for beginning, text in _FAMILIES.items() if last.startswith(beginning))
    return ELSEWHERE.get(last) or next(whole_family, None)
