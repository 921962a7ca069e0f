import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Secret
from support.attacks.planted import COMMAND, PLANTED

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import (
    build_config,
    flat_values,
    nested,
    secret_environment,
    write_config,
)
from agentrl.config.secrets import redact
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.config.validation.checks import groups_per_step
from agentrl.errors import ConfigError

SGLANG = ("--inference_backend", "sglang")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_step", "3"], "unknown flag --max_step; did you mean --max_steps?"),
        (["--qqqqqqqqq"], "unknown flag --qqqqqqqqq; see --help"),
        (["--max_steps"], "--max_steps needs a value"),
        (["--max_steps", "0"], "--max_steps: Input should be greater than or equal to 1, got '0'"),
        (["--num_generations", "100000000"], "or equal to 10000, got '100000000'"),
        (["--eval_num_generations", "100000000"], "or equal to 10000, got '100000000'"),
        (["--max_concurrent_samples_per_process", "100000000"], "less than or equal to 100000"),
        (["--groups_per_step", "100000000"], "less than or equal to 1000000"),
        (["--num_processes", "100000000"], "less than or equal to 100000"),
        (["--lora_rank", "100000000"], "less than or equal to 65536"),
        (["--trainer_threads", "100000000"], "less than or equal to 4096"),
        (["--output_dir="], "--output_dir is empty: give a folder, or remove the flag"),
        (["--scorer_module="], "--scorer_module is empty: give a file, or remove the flag"),
        (["demo"], "unexpected argument 'demo'"),
        ([""], "unexpected argument ''"),
        (
            ["--weight_sync=distributed", "--lora_rank", "4"],
            "use --weight_sync disk with adapters (--lora_rank)",
        ),
        (["--weight_sync=ipc"], "add --inference_backend sglang --share_gpus"),
        ([*SGLANG, "--colocated", "--weight_sync=ipc"], "--share_gpus, or use --weight_sync disk"),
        (
            [*SGLANG, "--share_gpus", "--weight_sync=ipc", "--lora_rank", "4"],
            "--weight_sync ipc supports whole models only",
        ),
        (
            [*SGLANG, "--share_gpus", "--weight_sync=ipc", "--inf_tp_size", "2"],
            "one trainer rank and one server on one GPU",
        ),
        (["--weight_sync=distributed", "--sglang_args=--dp 2"], "--dp 2: such a server"),
        (
            ["--mcp_servers", '{"a": {"url": "http://h", "headers": {"X-Api-Key": "k"}}}'],
            "--mcp_servers contains a secret (X-Api-Key)",
        ),
        (["--mcp_manager_url", "http://u:pw@h/mcp"], "--mcp_manager_url contains a password"),
        (["--inference_gateway", "http://h:1"], "--inference_gateway needs --inference_urls"),
        (
            [
                "--inference_gateway",
                "http://h:1",
                "--inference_urls",
                "http://h:2",
                "--lora_rank=4",
            ],
            "--inference_gateway and --lora_rank are mutually exclusive",
        ),
        (
            ["--colocated", "--enable_sampling", "false"],
            "--colocated requires sampling",
        ),
        (["--colocated", "--inference_urls", "http://h:2"], "remove --inference_urls"),
        (["--colocated", "--cpu_offload"], "remove one of the two"),
        ([*SGLANG, "--share_gpus", "--colocated"], "--colocated in turns; give one of the two"),
        (["--share_gpus", "--inference_urls", "http://h:2"], "remove --inference_urls"),
        ([*SGLANG, "--share_gpus", "--enable_sampling", "false"], "--share_gpus requires sampling"),
        (
            [*SGLANG, "--share_gpus", "--weight_sync", "distributed"],
            "--share_gpus puts two on each; use --weight_sync disk",
        ),
        (
            ["--trainer_gpus", "0-"],
            "--trainer_gpus: expected numbers and ranges of GPUs, such as 0-3",
        ),
        (["--trainer_gpus", "3-1"], "--trainer_gpus: expected numbers and ranges of GPUs"),
        (["--trainer_gpus", "0-99999999"], "--trainer_gpus: expected numbers and ranges of GPUs"),
        (["--trainer_gpus", "0-2,1"], "--trainer_gpus: a GPU occurs twice"),
        (["--trainer_gpus", "0-3", "--num_processes", "2"], "remove --num_processes"),
        ([*SGLANG, "--inference_gpus", "1-3", "--inf_tp_size", "2"], "need 2; name as many"),
        (
            [*SGLANG, "--inference_gpus", "1-3", "--num_inference_servers", "2"],
            "2 servers of 1 GPUs each need 2",
        ),
        ([*SGLANG, "--trainer_gpus", "0-3", "--inference_gpus", "2-5"], "share 2-3"),
        (
            [*SGLANG, "--trainer_gpus", "0,1", "--inference_gpus", "2,3", "--colocated"],
            "repeat those of --trainer_gpus",
        ),
        ([*SGLANG, "--inference_gpus", "1", "--enable_sampling", "false"], "starts no servers"),
        (["--inference_urls", "http://h:1", "--inference_gpus", "1"], "are already running"),
        ([*SGLANG, "--sglang_args=--tp 2"], "--sglang_args --tp: use --inf_tp_size"),
        ([*SGLANG, "--sglang_args=--base-gpu-id=4"], "use --inference_gpus"),
        ([*SGLANG, "--sglang_args='"], "No closing quotation"),
        (["--sglang_args=--dtype half"], "--sglang_args is a setting of SGLang"),
        (
            ["--inference_urls", "http://h:1", "--inf_tp_size", "2"],
            "AgentRL does not start the servers",
        ),
        (
            ["--colocated", "--consumer", "other"],
            "--consumer other: only the trainer that publishes",
        ),
        (["--colocated", "--weight_sync", "distributed"], "needs one process per GPU (NCCL)"),
        (
            ["--colocated", "--lora_rank", "4"],
            "publishing an adapter (--lora_rank) does not restore them",
        ),
        (["--cpu_ram_efficient_loading", "false"], "every rank reads only its own parts"),
        (["--enable_repetition_compress"], "--enable_repetition_compress needs --new_context"),
        (["--branch_rule", "value"], "--branch_rule value requires --rollouts tree"),
        (
            ["--rollouts", "tree", "--agent", "own.py:play"],
            "--agent own.py:play keeps its state in its own program",
        ),
        (
            ["--rollouts", "tree", "--agent_command", "my-agent {query}"],
            "--agent_command keeps its state in its own program",
        ),
        (
            ["--rollouts", "tree", "--new_context", "discard_all"],
            "--rollouts tree and a context that is rewritten",
        ),
        (["--branch_rule", "best"], "--branch_rule"),
        (
            ["--report_to", "jsonl,neptune"],
            "--report_to neptune is not supported; choose from none, console",
        ),
        (["--preferred_sampling_params", "{"], "--preferred_sampling_params is not valid JSON"),
        (["--preferred_sampling_params", '{"heat": 1}'], "unknown key 'heat'"),
        (["--eval_strategy", "ends"], "--eval_strategy ends needs --eval_file"),
        (["--config", "/nonexistent.yaml"], "--config /nonexistent.yaml: No such file"),
        (
            ["--inference_host", "0.0.0.0"],
            "--inference_host 0.0.0.0 is reachable from other machines",
        ),
        (
            ["--sglang_args=--api-key k"],
            "--sglang_args --api-key: command-line arguments are visible to every user of the "
            "machine",
        ),
        (["--inf_tp_size", "2"], "--inf_tp_size 2 is a setting of SGLang, and the embedded engine"),
        (["--inf_ep_size", "2"], "add --inference_backend sglang"),
        (["--inf_mem_ratio", "0.5"], "add --inference_backend sglang"),
        (["--torch_compile", "--torch_dtype", "float64"], "give --torch_compile false"),
        (["--torch_compile", "--tp_size", "2"], "--torch_compile true and --tp_size are mutually"),
        (["--model_name", "Qwen/Qwen3-4B"], "choose the model with --model_name_or_path"),
        (
            ["--adam_beta1", "0.8", "--optim_args", "beta1=0.9"],
            "--optim_args are mutually exclusive",
        ),
        (["--run_name", "../x"], "--run_name: up to 63 letters"),
        (["--run_name", "admin"], "--run_name: is reserved by MongoDB"),
        (["--delete_existing"], "--delete_existing requires --fresh"),
        (
            [
                "--fresh",
                "--delete_existing",
                "--model_name_or_path",
                "output/warm/m",
                "--run_name",
                "warm",
            ],
            "--delete_existing would delete --model_name_or_path; use another --run_name",
        ),
        (["--evaluated_route", '{"url": "x"}'], "unknown key 'url'"),
        (["--evaluated_route", '{"base_url": "localhost:1"}'], "must be an http(s) address"),
        (["--evaluated_route", '{"base_url": "http://a/v1"}'], "model is missing"),
        (
            [
                "--evaluated_route",
                '{"base_url": "http://a/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}',
            ],
            "the environment variable NO_SUCH_KEY is not set",
        ),
    ],
)
def test_a_users_mistake_is_one_clear_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_preferred_sampling_params_override_the_flags() -> None:
    config = parse_flags(
        ["--temperature", "0.5", "--preferred_sampling_params", '{"temperature": 0.9, "top_k": 5}']
    )
    assert (config.sampling.temperature, config.sampling.top_k) == (0.9, 5)


def test_a_flag_without_effect_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    parse_flags(["--dataloader_num_workers", "1"])
    assert "--dataloader_num_workers has no effect here" in capsys.readouterr().err


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    argv = ["--run_name", "a", "--max_steps", "9", "--train_file", "x.jsonl", "--inference_urls"]
    config = parse_flags([*argv, "http://127.0.0.1:1,http://127.0.0.1:2"])
    path = tmp_path / "config.yaml"
    write_config(config, path)
    assert parse_flags(["--config", str(path)]) == config


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("max_steps: 1:30", "--max_steps: .*got '1:30'"),
        ("learning_rate: 1:30.5", "--learning_rate: .*got '1:30.5'"),
        ("preferred_sampling_params: {temperature: 1:30}", "--temperature: .*got '1:30'"),
        ("max_steps: 2026-11-27", "--max_steps: .*got '2026-11-27'"),
    ],
)
def test_a_time_or_date_in_a_file_is_no_number(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(line)
    with pytest.raises(ConfigError, match=named) as caught:
        parse_flags(["--config", str(path)])
    assert "\n" not in str(caught.value)


def test_numbers_and_names_in_a_file_mean_what_they_mean_on_the_command_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_steps: 010\nrun_name: 2026-11-27\nlearning_rate: 1e-5\nseed: 0\n")
    typed = ["--max_steps", "010", "--run_name", "2026-11-27", "--learning_rate", "1e-5"]
    assert parse_flags(["--config", str(path)]) == parse_flags([*typed, "--seed", "0"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_running_requests": 10**8}, "advanced: max_running_requests: Input should be less"),
        ({"colocated": True, "publish_mode": "in_place"}, "--colocated releases it; use retract"),
        ({"tree_roots": 2}, "tree_roots requires --rollouts tree"),
        ({"branch_depth": 3}, "branch_depth requires --rollouts tree"),
        (
            {"rollouts": "tree", "num_generations": 4, "tree_roots": 4},
            "--num_generations 4, tree_roots 4 leave no rollout that could branch",
        ),
        (
            {"inference_api_key": "k", "sglang_args": "--tokenizer-worker-num=2"},
            "--sglang_args --tokenizer-worker-num: it disables the server's keys",
        ),
        (
            {"inference_api_key": "k", "inference_admin_key": "k"},
            "AGENTRL_API_KEY and AGENTRL_ADMIN_KEY are the same",
        ),
        ({"agent_gateway_host": "0.0.0.0"}, "give a specific address"),
        ({"veto_threshold": 0.001}, "give --proximal recompute"),
        ({"recipe": "cispo", "dual_clip": 3}, "setting of GRPO and GSPO"),
    ],
)
def test_settings_without_a_flag_are_checked_as_well(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(nested(values)))
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_flags(["--config", str(path)])


def test_settings_without_a_flag_stand_below_advanced(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_steps: 3\nadvanced:\n  lease_seconds: 7\n  top_p: 0.9\n")
    config = parse_flags(["--config", str(path)])
    assert (config.rollout.lease_seconds, config.sampling.top_p) == (7, 0.9)
    write_config(config, tmp_path / "written.yaml")
    assert parse_flags(["--config", str(tmp_path / "written.yaml")]) == config
    assert parse_flags(["--top_p", "0.9"]).sampling.top_p == 0.9  # the original AgentRL has it
    with pytest.raises(ConfigError, match="--lease_seconds is not a flag; set it in a file"):
        parse_flags(["--lease_seconds", "7"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lease_seconds: 7", "move lease_seconds below `advanced:`"),
        ("advanced: 7", "expected `name: value` lines below advanced:"),
        ("advanced:\n  lease_second: 7", "lease_second is not known; did you mean lease_seconds?"),
        ("advanced:\n  max_steps: 7", "advanced: max_steps is not known"),
        ("top_p: 1\nadvanced:\n  top_p: 1", "top_p is given twice"),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_flags(["--config", str(path)])


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max-steps: 3\nlearning_rate: 0.1\n")
    config = parse_flags(["--config", str(path), "--max_steps", "4"])
    assert (config.trainer.max_steps, config.trainer.learning_rate) == (4, 0.1)


def test_secrets_are_never_written_down(tmp_path: Path) -> None:
    config = build_config(
        {
            "db_connection_string": "mongodb://user:pa55word@db.example/x",
            "mcp_auth_token": "tok3n",
            "inference_api_key": "k3y",
        }
    )
    path = tmp_path / "config.yaml"
    write_config(config, path)
    written = path.read_text() + str(flat_values(config)) + repr(config)
    for secret in ("pa55word", "tok3n", "k3y"):
        assert secret not in written
    assert secret_environment(config) == {
        "MONGODB_URI": "mongodb://user:pa55word@db.example/x",
        "MCP_SERVER_TOKEN": "tok3n",
        "AGENTRL_API_KEY": "k3y",
    }


@pytest.mark.parametrize("values", [PLANTED, COMMAND])
def test_planted_secrets_reach_no_file_that_is_shown_and_no_line(
    tmp_path: Path, values: dict[str, str]
) -> None:
    config = build_config(values)
    path = tmp_path / "run" / "config.yaml"
    write_config(config, path)
    quoted = "; ".join(redact(f"it failed: {text}") for text in _texts(config))
    for text in (path.read_text(), str(flat_values(config)), quoted):
        assert re.findall(r"plant-\d+", text) == []
    private = path.with_name("config.secrets.yaml")
    assert [file.stat().st_mode & 0o777 for file in (path, private)] == [0o600, 0o600]
    assert not {"plant-01", "plant-14", "plant-15"} & set(
        re.findall(r"plant-\d+", private.read_text())
    )


def _texts(config: RootConfig) -> list[str]:
    tools = config.tools
    servers = json.loads("".join(_whole(tools.mcp_servers)) or "{}")
    return [
        str(
            config.store.db_connection_string
            and config.store.db_connection_string.get_secret_value()
        ),
        *(str(server) for server in servers.values()),
        *_whole(tools.tool_server_command),
        *_whole(config.agents.evaluated_route),
    ]


def _whole(value: Secret[Any] | None) -> list[str]:
    return [] if value is None else [str(value.get_secret_value())]


@pytest.mark.parametrize("flag", ["inference_urls", "inference_gateway"])
def test_addresses_that_are_stored_hold_no_secrets(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"inference_urls": "http://h:1", flag: "http://plant-10@one:1/?key=plant-11"})
    assert str(caught.value).startswith(
        f"--{flag} http://***@one:1/?key=***: the address must not contain"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"inference_api_key": ["plant-31"]},
        {"mcp_servers": {"a": "plant-32"}},
        {"evaluated_route": {"m": ["plant-33"]}},
        {"db_connection_string": {"uri": "plant-34"}},
        # In the wrong place.
        {"inference_api_key": "plant-35", "max_steps": "plant-35"},
        {"max_steps": "sk-proj-plant-36abcdefghijklmn"},
        {"tool_server_command": "tools --key plant-37", "mcp_manager_url": "http://plant-38@h"},
        {"mcp_manager_url": "http://h/mcp?token=plant-39", "mcp_servers": '{"a": "plant-40'},
    ],
)
def test_a_mistyped_secret_is_not_repeated(values: dict[str, Any]) -> None:
    try:
        config = build_config(values)
    except ConfigError as error:
        shown = redact(str(error))
    else:
        shown = repr(config) + str(flat_values(config)) + config.model_dump_json()
    assert not re.findall(r"plant-\d+", shown), shown


def test_a_command_shows_its_script_and_the_names_of_its_flags() -> None:
    config = build_config(
        {"tool_server_command": "python a/b.py --port {port} --key c0ffee -pc0ffee"}
    )
    shown = "python a/b.py --port {port} --key *** ***"
    assert str(config.tools.tool_server_command) == shown


def test_processes_of_the_run_read_the_whole_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(PLANTED)
    path = tmp_path / "config.yaml"
    write_config(config, path, made=("inference_api_key", "inference_admin_key"))
    joined = parse_flags(["--config", str(path)])
    assert joined.tools.mcp_servers == config.tools.mcp_servers
    assert joined.inference == config.inference
    assert joined.agents == config.agents
    monkeypatch.setenv("AGENTRL_ADMIN_KEY", "")  # how samplers are started
    assert parse_flags(["--config", str(path)]).inference.inference_admin_key is None
    write_config(build_config({}), path)
    assert not path.with_name("config.secrets.yaml").exists()


def test_a_uri_without_a_password_is_written_for_further_samplers(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_config(build_config({"db_connection_string": "mongodb://127.0.0.1:1/x"}), path)
    assert yaml.safe_load(path.read_text())["db_connection_string"] == "mongodb://127.0.0.1:1/x"


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONGODB_URI", "mongodb://127.0.0.1:9/x")
    uri = parse_flags([]).store.db_connection_string
    assert uri is not None
    assert uri.get_secret_value() == "mongodb://127.0.0.1:9/x"


def test_groups_per_step_follow_from_batch_sizes_when_not_given() -> None:
    config = build_config({"gradient_accumulation_steps": 48, "num_generations": 8})
    assert groups_per_step(config) == 6
    assert groups_per_step(config, num_ranks=2) == 12
    assert groups_per_step(build_config({"groups_per_step": 3})) == 3
    assert groups_per_step(build_config({"gradient_accumulation_steps": 9})) == 2


def test_an_answer_schema_that_is_no_tag_is_refused() -> None:
    with pytest.raises(ConfigError, match="without angle brackets"):
        parse_flags(["--default_answer_schema", "<answer>"])


def test_named_gpus_say_how_many_ranks_and_servers_there_are(tmp_path: Path) -> None:
    words = [*SGLANG, "--trainer_gpus", "0-3", "--inference_gpus", "4-7", "--inf_tp_size", "2"]
    config = parse_flags(words)
    assert (config.trainer.trainer_gpus, config.trainer.num_processes) == ((0, 1, 2, 3), 4)
    assert config.inference.num_inference_servers == 2
    (tmp_path / "run.yaml").write_text(
        "inference_backend: sglang\ninf_tp_size: 2\ntrainer_gpus: 0-3\ninference_gpus: [4, 5-7]\n"
    )
    assert parse_flags(["--config", str(tmp_path / "run.yaml")]) == config
    write_config(config, tmp_path / "written.yaml")
    assert parse_flags(["--config", str(tmp_path / "written.yaml")]) == config


def test_synchronous_sampling_means_no_staleness() -> None:
    assert build_config({"sync_sampling": True}).algorithm.max_staleness == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--importance_correction", "tis"], "give --proximal recompute"),
        (["--proximal", "recompute", "--loss_calculator", "minirl"], "use --proximal behavior"),
        (
            ["--proximal", "recompute", "--max_trained_count", "2"],
            "use --proximal behavior or loglinear",
        ),
        (["--loss_normalizer_length", "100"], "--token_level_loss false"),
        (["--loss_calculator", "cispo", "--strict_in_bound"], "setting of GRPO and MINIRL"),
        (["--loss_calculator", "gspo", "--out_of_date_decay", "1"], "GSPO ignores it"),
        (["--loss_calculator", "gspo", "--importance_weight_cap_ratio", "2"], "ignores it"),
        (["--recipe", "grpo", "--strict_in_bound"], "--importance_weight_cap_ratio 0 turns"),
    ],
)
def test_losses_that_contradict_themselves_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_flags(flags)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--advantage_estimator", "opd"], "opd needs teachers; give --teachers NAME"),
        (["--teacher_weight", "0.5"], "--teacher_weight needs teachers"),
        (
            ["--advantage_estimator", "opd", "--teachers", "a", "--teacher_weight", "0.5"],
            "no rewards to mix with",
        ),
        (["--teachers", "a,a"], "given twice"),
        (["--teachers", "a.b"], "letters, digits"),
        (["--teachers", "a", "--teacher_weight", "1", "--temperature", "0.7"], "temperature 1"),
        (["--teachers", "a", "--teacher_weight", "1", "--minimal_advantage", "0"], "one advantage"),
        (["--teachers", "a", "--teacher_weight", "1", "--recipe", "reinforce_pp"], "normalizes"),
    ],
)
def test_teachers_that_cannot_be_followed_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_flags(flags)


def test_the_loss_is_one_of_reinforcement_learning_in_any_case() -> None:
    assert parse_flags(["--loss_calculator", "minirl"]).algorithm.loss_calculator == "MINIRL"
    with pytest.raises(ConfigError, match="agentrl sft"):
        parse_flags(["--loss_calculator", "CrossEntropy"])
    with pytest.raises(
        ConfigError, match=r"^--loss_calculator GRP0 .* mean GRPO\? \(known: GRPO, "
    ):
        parse_flags(["--loss_calculator", "GRP0"])
    with pytest.raises(ConfigError, match="--recipe dapo"):
        parse_flags(["--loss_calculator", "dapo"])


def test_a_choice_that_is_not_known_names_the_nearest_and_all() -> None:
    expected = "--merge trees is not known; did you mean tree? (known: auto, tree, packed, none)"
    with pytest.raises(ConfigError) as error:
        parse_flags(["--merge", "trees"])
    assert str(error.value) == expected


def test_flags_beside_a_recipe_count_more_and_a_typed_recipe_more_than_the_file(
    tmp_path: Path,
) -> None:
    plain = parse_flags(["--recipe", "dapo", "--epsilon_higher", "0.1"])
    assert (plain.algorithm.epsilon_higher, plain.algorithm.sign_clip) == (0.1, False)
    write_config(plain, tmp_path / "run.yaml")
    config = ["--config", str(tmp_path / "run.yaml")]
    assert parse_flags(config) == plain
    other = parse_flags([*config, "--recipe", "gspo"]).algorithm
    assert other == parse_flags(["--recipe", "gspo"]).algorithm
    (tmp_path / "short.yaml").write_text("recipe: gspo\nmax_steps: 3\n")
    assert parse_flags(["--config", str(tmp_path / "short.yaml")]).algorithm == other
    assert build_config({"recipe": "gspo"}).algorithm == other
    assert AlgorithmSection(recipe="gspo") == other


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--recipe dappo is not known; did you mean dapo\?"):
        parse_flags(["--recipe", "dappo"])


def test_servers_may_be_given_as_json_that_names_its_secrets() -> None:
    servers = {"url": "http://h", "headers": {"Authorization": "Bearer ${T}", "MCP_SERVERS": "a"}}
    text = json.dumps({"mcpServers": {"a": servers}})
    given = parse_flags(["--mcp_servers", text]).tools.mcp_servers
    assert _whole(given) == [text]


def test_the_judge_scores_by_default_only_where_one_is_configured() -> None:
    assert parse_flags([]).data.default_scorer is None
    judged = parse_flags(["--agent_config_path", "judge.yml"])
    assert judged.data.default_scorer == "agentcpm"
    named = ["--agent_config_path", "judge.yml", "--default_scorer", "em"]
    assert parse_flags(named).data.default_scorer == "em"


@pytest.mark.parametrize(
    ("argv", "expected", "elsewhere"),
    [
        (["--env", "verifiers:sums"], 16, 4),
        (["--env", "textarena:Wordle-v0", "--eval_env", "harbor:tasks"], 16, 4),
        (["--env", "verifiers:sums", "--num_samplers", "0"], 32, 8),
        (["--env", "verifiers:sums", "--num_samplers", "100"], 1, 1),
        (["--env", "verifiers:sums", "--max_concurrent_samples_per_process", "16"], 16, 16),
        (["--env", "textarena:Wordle-v0"], 256, 256),
        (["--env", "unheard:of"], 256, 256),
    ],
)
def test_rollouts_that_start_programs_are_limited_by_the_cores_of_each_machine(
    argv: list[str], expected: int, elsewhere: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = parse_flags(argv)
    assert config.rollout.max_concurrent_samples_per_process == expected
    write_config(config, tmp_path / "config.yaml")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    joining = parse_flags(["--config", str(tmp_path / "config.yaml")])
    assert joining.rollout.max_concurrent_samples_per_process == elsewhere
    # A resumed run does not report it as a changed flag.
    assert flat_values(joining) == flat_values(config)


def test_a_users_loss_reads_every_setting() -> None:
    given = ["--loss_calculator", "own.py:loss", "--beta1", "0.5", "--strict_in_bound"]
    config = parse_flags([*given, "--loss_args", '{"bound": 2}'])
    assert config.algorithm.loss_calculator == f"{Path.cwd()}/own.py:loss"
    assert config.algorithm.loss_args == {"bound": 2}
    assert parse_flags(["--loss_calculator", "pkg.losses:mine"]).algorithm.loss_calculator == (
        "pkg.losses:mine"
    )


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (["--loss_args", '{"bound": 2}'], "GRPO is built in; give --loss_calculator file.py:name"),
        (["--group_filter", "own.py"], "--group_filter: give file.py:name"),
        (["--loss_calculator", ":loss"], "--loss_calculator: give file.py:name"),
        (["--on_step", "own.py:"], "--on_step: give file.py:name"),
        (
            ["--lr_scheduler_type", "own.py:rate", "--warmup_steps", "3"],
            "replaces --warmup_steps 3; remove it",
        ),
        (["--advantage_estimator", "group_men"], "did you mean group_mean?"),
        (
            ["--advantage_estimator", "grpo"],
            "its estimator is group_std, and --recipe grpo selects",
        ),
        (["--advantage_estimator", "dr_grpo"], "its estimator is group_mean"),
        (["--advantage_estimator", "rloo"], "its estimator is leave_one_out"),
        (["--loss_calculator", "own.py"], "a function of your own is written own.py:NAME"),
        (["--loss_calculator", "own.good"], "a function of your own is written own:good"),
        (["--loss_args", "bound=3"], """write '{"bound": VALUE}'"""),
        (["--system_prompt", __file__], "give the text and not its file"),
        (["--scorer", "own.py"], "--scorer_module FILE.py registers scorers, and --default_scorer"),
    ],
)
def test_what_people_mean_is_answered_by_flag(given: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_flags(given)
    assert remedy in str(error.value)
