"""Checks that span several flags: contradictions, unsupported combinations, misplaced secrets.

Input: a configuration whose values are individually valid. Output: the first problem as a
`ConfigError`. Files and servers named by flags are checked elsewhere (`launcher.checks.preflight`).
"""

import ipaddress
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.addresses import is_loopback
from agentrl.config.optimizer_arguments import parse_optim_args
from agentrl.config.rules import broken_rules
from agentrl.config.secrets import SECRET_NAME, SecretUrl, redact, secrets_of
from agentrl.config.sections import (
    AgentSection,
    DataSection,
    InferenceSection,
    ModelSection,
    RootConfig,
    ToolsSection,
)
from agentrl.config.validation.algorithm_checks import (
    loss_contradictions,
    schedule_contradictions,
    teacher_contradictions,
)
from agentrl.config.validation.placement_checks import (
    DP_FLAGS,
    PP_FLAGS,
    ipc_contradictions,
    placement_contradictions,
    sglang_words,
    with_implied_processes,
)
from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, loaded_hook
from agentrl.schema.answer_form import is_answer_schema

_ROUTE_KEYS = {"base_url", "model", "api_key_env"}
_SGLANG_KEY_FLAGS = {"--api-key": "AGENTRL_API_KEY", "--admin-api-key": "AGENTRL_ADMIN_KEY"}
_SGLANG_OPEN_FLAGS = frozenset(
    {"--tokenizer-worker-num", "--grpc-mode", "--smg-grpc-mode", "--grpc-port", "--encoder-only"}
)
"""Arguments that open listeners without SGLang's key check."""
_SGLANG_ONLY = frozenset({"inf_tp_size", "inf_ep_size", "inf_mem_ratio", "sglang_args"})
"""Settings that the embedded engine does not read; on shared GPUs, it reads `inf_mem_ratio`."""
_MONGO_SCHEMES = ("mongodb://", "mongodb+srv://")
_ROLLOUTS_PER_CORE = 4
"""Concurrent rollouts that start programs; more would share the cores while these start."""
JUDGE = "agentcpm"
"""The scorer that calls the language model of `--agent_config_path`."""
BUILT_IN_REPORTS = ("none", "console", "jsonl")
"""Values of `--report_to` for outputs that are always written."""
REPORT_TO = (*BUILT_IN_REPORTS, "tensorboard", "wandb", "swanlab", "trackio", "mlflow")


def check_config(config: RootConfig) -> RootConfig:
    """Return the configuration with implied values filled in."""
    config = _with_implied_rollouts(with_implied_processes(config))
    for problem in (
        *_unknown_trackers(config.trainer.report_to),
        *_contradictions(config),
    ):
        raise ConfigError(problem)
    if config.data.default_scorer is None and config.rollout.agent_config_path is not None:
        data = config.data.model_copy(update={"default_scorer": JUDGE})
        config = config.model_copy(update={"data": data})
    return config


def check_fine_tuning(data: DataSection) -> None:
    """Refuse fine-tuning on nothing, or on two things at once."""
    if (data.train_file is None) == (data.records_of is None):
        raise ConfigError("`agentrl sft` needs either --train_file FILE or --records_of RUN_NAME")


def groups_per_step(config: RootConfig, num_ranks: int = 1) -> int:
    """Return the number of groups that one optimizer step consumes."""
    trainer = config.trainer
    if trainer.groups_per_step is not None:
        return trainer.groups_per_step
    records = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * num_ranks
    return -(-records // config.data.num_generations)


def _with_implied_rollouts(config: RootConfig) -> RootConfig:
    """Return the configuration with as many concurrent rollouts as this machine has cores for."""
    rollout = config.rollout
    name = "max_concurrent_samples_per_process"
    kinds = {uri.partition(":")[0] for uri in config.data.environments.values()}
    # An unknown kind is reported where its tasks are read.
    sources = [loaded_hook("task_sources", kind) for kind in kinds]
    starts_programs = any(source is not None and source.starts_programs for source in sources)
    if not starts_programs or name in rollout.model_fields_set:
        return config
    programs = _ROLLOUTS_PER_CORE * (os.cpu_count() or 1)
    rollout = rollout.model_copy(update={name: max(1, programs // max(1, rollout.num_samplers))})
    # It remains unset, and thus out of the files of a run, whose samplers may join from machines
    # with other numbers of cores.
    rollout.model_fields_set.remove(name)
    return config.model_copy(update={"rollout": rollout})


def _unknown_trackers(report_to: Sequence[str]) -> Iterator[str]:
    for name in report_to:
        if name not in REPORT_TO:
            yield f"--report_to {name} is not supported; choose from {', '.join(REPORT_TO)}"


def _secrets_in_flags(tools: ToolsSection) -> Iterator[str]:
    """Find secrets in flags, because every user of the machine can read the command line."""
    url, servers_value = tools.mcp_manager_url, tools.mcp_servers
    if url is not None and urlsplit(url.get_secret_value()).password is not None:
        yield (
            "--mcp_manager_url contains a password; set MCP_SERVER_TOKEN in the environment instead"
        )
    if servers_value is None or not servers_value.is_json:
        return
    try:
        servers = json.loads(servers_value.get_secret_value())
    except (ValueError, RecursionError):
        return  # reported where the servers are read
    for name, value in _named_texts(servers):
        if SECRET_NAME.search(name) and "${" not in value:
            yield (
                f"--mcp_servers contains a secret ({name}), and command-line arguments are visible "
                "to every user of the machine; give the JSON as a file, or the secret as "
                "${VARIABLE}"
            )


def _named_texts(value: object) -> Iterator[tuple[str, str]]:
    """Yield every text in `headers` and `env` of a JSON value, with its name."""
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key in ("headers", "env") and isinstance(inner, dict):
            yield from ((name, text) for name, text in inner.items() if isinstance(text, str))
        else:
            yield from _named_texts(inner)


def _contradictions(config: RootConfig) -> Iterator[str]:
    yield from broken_rules(config)
    yield from loss_contradictions(config.algorithm)
    yield from schedule_contradictions(config.trainer)
    yield from _agent_contradictions(config.agents)
    yield from _rollout_contradictions(config)
    yield from _tree_contradictions(config)
    yield from _broadcast_contradictions(config)
    yield from ipc_contradictions(config)
    yield from _address_problems(config.inference)
    yield from _key_contradictions(config.inference)
    yield from _secrets_in_flags(config.tools)
    yield from _model_contradictions(config.model)
    trainer, tools = config.trainer, config.tools
    missing = [name for name in tools.tool_server_env if name not in os.environ]
    is_started = tools.tool_server_url is not None
    if missing and tools.tool_server_command is not None and not is_started:
        yield f"--tool_server_env: the environment variable {missing[0]} is not set"
    yield from teacher_contradictions(config)
    if trainer.groups_per_step is not None and trainer.groups_per_step < 1:
        yield f"--groups_per_step must be at least 1, got {trainer.groups_per_step}"
    for name in config.data.env_variables:
        if name not in os.environ:
            yield f"--env_variables: the environment variable {name} is not set"
    model, output = Path(config.model.model_name_or_path), config.run.output_path
    if config.run.delete_existing and model.resolve().is_relative_to(output.resolve()):
        yield "--delete_existing would delete --model_name_or_path; use another --run_name"
    parse_optim_args(trainer.optim_args)
    uri = config.store.db_connection_string
    if uri is not None and not uri.get_secret_value().startswith(_MONGO_SCHEMES):
        # Not quoted: it may contain a password.
        yield "--db_connection_string: expected mongodb://HOST:PORT or mongodb+srv://HOST"
    yield from _engine_contradictions(config.inference)
    yield from placement_contradictions(config)


def _model_contradictions(model: ModelSection) -> Iterator[str]:
    if "/" in model.model_name and "model_name_or_path" not in model.model_fields_set:
        yield (
            f"--model_name {model.model_name} is the name under which servers serve the model; "
            "choose the model with --model_name_or_path"
        )
    fields = type(model).model_fields
    for name in ("lora_alpha", "lora_target_modules"):
        if not model.lora_rank and getattr(model, name) != fields[name].default:
            yield f"--{name} requires --lora_rank; give the rank of the adapter"


def _engine_contradictions(inference: InferenceSection) -> Iterator[str]:
    """Find an unknown kind of server, and settings of SGLang without an SGLang server to start."""
    known = ["sglang", *hooks("servers")]
    if inference.inference_backend not in known and not inference.inference_urls:
        yield (
            f"--inference_backend {inference.inference_backend}: unknown (known: {', '.join(known)})"
        )
    if inference.inference_urls:
        reason = "AgentRL does not start the servers of --inference_urls; remove the flag"
    elif inference.inference_backend == "embedded":
        reason = (
            "the embedded engine does not support it; add --inference_backend sglang, or remove "
            "the flag"
        )
    else:
        return
    unread = _SGLANG_ONLY - {"inf_mem_ratio"} if inference.share_gpus else _SGLANG_ONLY
    for name in sorted(unread & inference.model_fields_set):
        value = getattr(inference, name)
        if value != type(inference).model_fields[name].default:
            value_text = "" if name == "sglang_args" else f" {value}"  # may contain secrets
            yield f"--{name}{value_text} is a setting of SGLang, and {reason}"


def _key_contradictions(inference: InferenceSection) -> Iterator[str]:
    host, key = inference.inference_host, inference.inference_api_key
    if not is_loopback(host) and key is None:
        yield (
            f"--inference_host {host} is reachable from other machines; set AGENTRL_API_KEY and "
            "AGENTRL_ADMIN_KEY, or listen on 127.0.0.1"
        )
    if key is not None and key == inference.inference_admin_key:
        yield (
            "AGENTRL_API_KEY and AGENTRL_ADMIN_KEY are the same; samplers know the first and must "
            "not update weights: choose another admin key"
        )
    for word in sglang_words(inference):
        if word in _SGLANG_KEY_FLAGS:
            yield (
                f"--sglang_args {word}: command-line arguments are visible to every user of the "
                f"machine; set {_SGLANG_KEY_FLAGS[word]} in the environment"
            )
        if word in _SGLANG_OPEN_FLAGS and (key or inference.inference_admin_key):
            yield f"--sglang_args {word}: it disables the server's keys; remove it"


def _rollout_contradictions(config: RootConfig) -> Iterator[str]:
    schema = config.data.default_answer_schema
    if schema is not None and not is_answer_schema(schema):
        yield (
            f"--default_answer_schema {schema!r}: give `boxed`, `####`, `Answer:`, or the name of a "
            "tag without angle brackets"
        )
    rollout = config.rollout
    for network in rollout.image_networks:
        if not _is_network(network):
            yield f"image_networks {network}: expected networks such as 10.1.0.0/16 or fd00::/8"
    if rollout.enable_repetition_compress and rollout.repetition_early_stop_times <= 0:
        yield "--enable_repetition_compress needs --repetition_early_stop_times above 0"


def _tree_contradictions(config: RootConfig) -> Iterator[str]:
    data = config.data
    if data.rollouts == "tree" and (data.tree_roots or 1) >= data.num_generations:
        yield (
            f"--rollouts tree: of --num_generations {data.num_generations}, tree_roots "
            f"{data.tree_roots or 1} leave no rollout that could branch"
        )


def _address_problems(inference: InferenceSection) -> Iterator[str]:
    """Find malformed addresses, and secrets in addresses, which are stored and logged."""
    addresses = [("inference_urls", url) for url in inference.inference_urls]
    if inference.inference_gateway is not None:
        addresses.append(("inference_gateway", inference.inference_gateway))
    for flag, url in addresses:
        if next(secrets_of(SecretUrl(url)), None) is not None:
            yield (
                f"--{flag} {redact(url)}: the address must not contain credentials or a query; set "
                "the servers' key in AGENTRL_API_KEY"
            )
        elif not _is_http_address(url):
            yield f"--{flag} {redact(url)}: expected http://HOST:PORT"


def _broadcast_contradictions(config: RootConfig) -> Iterator[str]:
    if config.publish.weight_sync != "distributed":
        return
    arguments = sglang_words(config.inference)
    for flags in (DP_FLAGS, PP_FLAGS):
        for flag, value in pairwise(arguments):
            if flag in flags and value != "1":
                yield (
                    f"--sglang_args {flag} {value}: such a server cannot receive broadcast "
                    "weights; use --weight_sync disk, or more servers instead"
                )


def _route_contradictions(route: Mapping[str, str]) -> Iterator[str]:
    unknown = sorted(route.keys() - _ROUTE_KEYS)
    if unknown:
        known = ", ".join(sorted(_ROUTE_KEYS))
        yield f"--evaluated_route: unknown key {unknown[0]!r} (known: {known})"
    if not route.get("base_url", "").startswith(("http://", "https://")):
        yield "--evaluated_route: base_url must be an http(s) address, such as .../v1"
    if not route.get("model"):
        yield "--evaluated_route: model is missing; give the model's name on that server"
    variable = route.get("api_key_env")
    if variable is not None and not os.environ.get(variable):
        yield f"--evaluated_route: the environment variable {variable} is not set"


def _agent_contradictions(agents: AgentSection) -> Iterator[str]:
    python = agents.agent_python
    if python is not None and (not os.access(python, os.X_OK) or python.is_dir()):
        yield f"--agent_python {python}: program not found; give the bin/python of an environment"
    if agents.evaluated_route is not None:
        yield from _route_contradictions(agents.evaluated_route.get_secret_value())
    if agents.agent_gateway_host in ("0.0.0.0", "::"):
        yield (
            f"agent_gateway_host {agents.agent_gateway_host}: give a specific address, because "
            "agents connect to it"
        )


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _is_http_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unclosed brackets, or a port above 65535
        return False
