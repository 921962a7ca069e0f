"""Flags as they are typed. What their values may be is in `test_loading`."""

import click
import pytest

from agentrl.config.command_line import FlagCommand, parse_flags
from agentrl.config.flags import ALIASES, FLAGS, NO_EFFECT, ONE_VALUE, ORIGINAL, SHORTHANDS
from agentrl.errors import ConfigError


def test_underscores_and_hyphens_are_alike() -> None:
    assert parse_flags(["--max-steps", "7"]) == parse_flags(["--max_steps", "7"])


def test_the_original_misspelling_is_accepted() -> None:
    config = parse_flags(["--loss_calculater", "MINIRL"])
    assert config.algorithm.loss_calculator == "MINIRL"


def test_a_bool_flag_stands_alone_or_takes_a_value() -> None:
    assert parse_flags(["--strict_in_bound"]).algorithm.strict_in_bound
    assert not parse_flags(["--sign_clip", "false"]).algorithm.sign_clip


def test_negative_values_are_not_mistaken_for_flags() -> None:
    assert parse_flags(["--top_k", "-1"]).sampling.top_k == -1


def test_only_what_may_be_left_out_is_in_brackets() -> None:
    options = [click.Option(["--turn"], required=True), click.Option(["--edit"], metavar="FILE")]
    assert FlagCommand("fork", params=options).usage("fork") == "fork --turn TEXT [--edit FILE]"


def test_the_last_of_two_values_counts() -> None:
    assert parse_flags(["--max_steps", "3", "--max_steps=5"]).trainer.max_steps == 5


def test_a_value_that_begins_like_a_flag_follows_an_equals_sign() -> None:
    argv = ["--inference_backend", "sglang", "--sglang_args=--dp 1"]
    assert parse_flags(argv).inference.sglang_args == "--dp 1"
    with pytest.raises(ConfigError, match=r"^--sglang_args needs a value$"):
        parse_flags(["--sglang_args", "--dp 1"])


def test_flags_of_the_original_are_accepted() -> None:
    argv = ["--bf16", "--pp_size", "1", "--cpu_ram_efficient_loading", "true"]
    assert parse_flags(argv).model.torch_dtype == "bfloat16"
    assert parse_flags(["--bf16", "false"]).model.torch_dtype == "auto"
    assert parse_flags(["--bf16", "--torch_dtype", "float32"]).model.torch_dtype == "float32"
    with pytest.raises(ConfigError, match=r"^--bf16: Input should be a valid boolean, got 'x'$"):
        parse_flags(["--bf16", "x"])


@pytest.mark.parametrize("flag", NO_EFFECT)
def test_a_flag_without_effect_may_stand_alone(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_flags([f"--{flag}"]) == parse_flags([f"--{flag}", "1"]) == parse_flags([])
    assert capsys.readouterr().err.count(f"note: --{flag} has no effect here") == 2


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["--lr", "0.1"], ["--learning_rate", "0.1"]),
        (["--beta", "0.04"], ["--kl_coefficient", "0.04"]),
        (["--group_size", "4"], ["--num_generations", "4"]),
        (["--model", "a/b"], ["--model_name_or_path", "a/b"]),
        (["--resume_from_checkpoint"], []),
        (["--output_router_logits", "false", "--trainer", "QwenTrainer"], []),
        (["--adam_beta1", "0.8"], ["--optim_args", "beta1=0.8"]),
        (
            ["--adam_beta2", "0.99", "--adam_epsilon", "1e-6"],
            ["--optim_args", "beta2=0.99,eps=1e-6"],
        ),
    ],
)
def test_names_of_other_trainers_that_mean_the_same_are_aliases(
    typed: list[str], same: list[str]
) -> None:
    assert parse_flags(typed) == parse_flags(same)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--epsilon_high", "0.28"], ["did you mean --epsilon_higher?", "docs/coming-from.md"]),
        (["--actor_rollout_ref.actor.optim.lr", "1"], ["did you mean --lr?"]),
        (["--batch_size", "4"], ["docs/coming-from.md"]),
        (["--disable_tqdm"], ["docs/coming-from.md"]),
        (["--output_router_logits", "true"], ["--router_replay"]),
        (["--resume_from_checkpoint", "x"], ["--run_name"]),
    ],
)
def test_names_of_other_trainers_that_mean_something_else_are_refused(
    typed: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(typed)
    text = str(caught.value)
    assert typed[0] in text
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("flag", ["--size", "--model_size", "--file", "--steps_total", "--grid"])
def test_no_flag_is_suggested_that_only_shares_a_syllable(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown flag {flag}; see --help; "):
        parse_flags([flag, "1"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning_rat", "learning_rate"),
        ("--num_generation", "num_generations"),
        ("--max_step", "max_steps"),
        ("--max_turn", "max_turns"),
        ("--temprature", "temperature"),
        ("--loss_calculater2", "loss_calculater"),
        ("--tool_server_comand", "tool_server_command"),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=meant):
        parse_flags([typed, "1"])


OF_THE_ORIGINAL = """
    trainer train_file remove_experience drop_zero_advantage shift_labels
    db_connection_string oss_connection_string enable_oss skip_non_positive_advantage
    model_name_or_path attention_implementation output_router_logits trust_remote_code
    cpu_ram_efficient_loading torch_dtype tp_size pp_size ep_size cp_size pad_to_multiple_of
    bypass_causal_mask_check enable_loss_parallel loss_seq_chunk_size activation_offloading
    remove_unused_columns pad_to_maximum dynamic_batching learning_rate
    epsilon epsilon_higher beta1 beta2 tune_vision adv_scaling max_tokens balance_sample
    token_level_loss out_of_date_decay importance_weight_cap_ratio strict_in_bound
    log_entropy skip_length_normalization loss_calculater max_trained_count
    retrained_interval minimal_advantage enable_sampling sync_sampling max_new_tokens
    max_prompt_tokens num_generations tool_call_parser model_name inf_tp_size inf_ep_size
    max_concurrent_samples_per_process target_concurrency inf_mem_ratio top_k
    presence_penalty frequency_penalty preferred_sampling_params resample_error_records
    mcp_server_name mcp_manager_url mcp_auth_token max_turns min_turns
    repetition_early_stop_times enable_repetition_compress new_context agent_config_path
    reserve_context_error_count efficient_rewarding max_steps num_train_epochs
    per_device_train_batch_size gradient_accumulation_steps dataloader_num_workers
    dataloader_prefetch_factor max_grad_norm optim_args weight_decay warmup_steps
    lr_scheduler_type bf16 logging_steps save_steps save_only_model save_total_limit
    report_to run_name output_dir resume_from_checkpoint eval_strategy eval_steps seed
    torch_compile gradient_checkpointing accelerator_config
"""
"""The original's own flags, and those of Hugging Face that its scripts and documents use.

Two are unknown here, because a run without them would be another: `max_pixels` and
`decoder_sparse_step`."""


@pytest.mark.parametrize("name", OF_THE_ORIGINAL.split())
def test_every_flag_of_the_original_is_taken(name: str) -> None:
    accepted = {*FLAGS, *ORIGINAL, *ALIASES, *NO_EFFECT, *ONE_VALUE, *SHORTHANDS}
    assert name in accepted


_TRAINING = """
    --cpu_ram_efficient_loading true --weight_decay 0.05 --lr_scheduler_type cosine
    --learning_rate 2e-6 --optim_args beta1=0.9,beta2=0.98 --adv_scaling 2.0 --max_tokens 131072
    --max_trained_count 1 --max_steps 1000 --dataloader_drop_last true --dataloader_num_workers 1
    --dataloader_prefetch_factor 4 --max_grad_norm 1.0 --logging_steps 1 --bf16 --tp_size 4
    --pp_size 1 --trainer QwenTrainer --per_device_train_batch_size 1 --activation_offloading true
    --gradient_accumulation_steps 48 --seed 42 --eval_strategy no --eval_steps 5 --save_steps 3
    --report_to swanlab --pad_to_multiple_of 4096 --num_generations 8 --train_file questions.jsonl
    --resume_from_checkpoint true
"""
_SAMPLING = """
    --enable_sampling true --max_new_tokens 32768 --max_prompt_tokens 128768
    --tool_call_parser qwen --inf_tp_size 1 --inf_mem_ratio 0.8
    --max_concurrent_samples_per_process 4 --target_concurrency 3 --frequency_penalty 0
    --repetition_early_stop_times 4 --enable_repetition_compress false --inference_backend sglang
    --model_name_or_path Qwen/Qwen3-4B --output_dir output/run --run_name run
    --db_connection_string mongodb://127.0.0.1:27017/run --mcp_server_name all
    --mcp_manager_url http://127.0.0.1:9876/mcpapi
"""
ORIGINAL_SCRIPTS = {
    "grpo": _TRAINING
    + _SAMPLING
    + """
    --loss_calculater GRPO --token_level_loss true --num_train_epochs 5 --warmup_steps 5
    --balance_sample true --save_only_model true --max_turns 200 --presence_penalty 0
    """,
    "minirl": _TRAINING
    + _SAMPLING
    + """
    --loss_calculater MINIRL --token_level_loss false --strict_in_bound true
    --skip_length_normalization true --num_train_epochs 3 --warmup_steps 10
    --balance_sample false --save_only_model false --max_turns 100 --compress_history false
    --presence_penalty 0
    """,
    "eval": _SAMPLING
    + """
    --max_turns 200 --new_context discard_all --presence_penalty 1.0 --num_generations 4
    """,
}
"""The flags of the original's three scripts."""


@pytest.mark.parametrize("script", ORIGINAL_SCRIPTS)
def test_the_original_scripts_flags_are_accepted_as_they_stand(script: str) -> None:
    preferred = '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}'
    argv = [*ORIGINAL_SCRIPTS[script].split(), "--preferred_sampling_params", preferred]
    config = parse_flags([*argv, "--accelerator_config", '{"split_batches": true}'])
    assert config.rollout.max_turns == (100 if script == "minirl" else 200)
    assert config.trainer.activation_offloading == (script != "eval")
    assert config.algorithm.loss_calculator == ("MINIRL" if script == "minirl" else "GRPO")
