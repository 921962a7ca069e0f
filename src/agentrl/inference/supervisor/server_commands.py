"""The command lines of inference servers."""

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path

from agentrl.config.checks import is_loopback
from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.errors import ConfigError
from agentrl.inference.supervisor.starters import sglang_starter

_SGLANG_TOOL_CALL_PARSERS = frozenset(
    {
        *("deepseekv3", "deepseekv31", "kimi_k2", "llama3", "mistral", "pythonic"),
        *("qwen", "qwen25", "qwen3_coder"),
    }
)


def server_command(
    inference: InferenceSection,
    model: ModelSection,
    *,
    model_path: Path,
    port: int,
    version: int,
    seed: int,
) -> list[str]:
    """Return the argv of an inference server that starts on the weights of `model_path`.

    Keys are not on the command line, where every user of the machine could read them; both kinds
    of server take `AGENTRL_API_KEY` and `AGENTRL_ADMIN_KEY` from their environment.
    """
    if inference.inference_backend == "embedded":
        return _embedded(inference, model_path=model_path, port=port, version=version, seed=seed)
    return _sglang(inference, model, model_path=model_path, port=port, version=version, seed=seed)


def check_keys(inference: InferenceSection) -> None:
    """Refuse to start servers for others that everyone who may generate could also control.

    Raises:
        ConfigError: they listen beyond this machine and have no key of their own for control.
    """
    if not is_loopback(inference.inference_host) and inference.inference_admin_key is None:
        raise ConfigError(
            f"--inference_host {inference.inference_host} is reachable from outside, and whoever "
            "has the API key could exchange the weights; set AGENTRL_ADMIN_KEY as well"
        )


def sglang_python() -> str:
    """Return the interpreter that has SGLang: this one, or the one of the `sglang` command.

    Raises:
        ConfigError: SGLang is not installed.
    """
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    script = shutil.which("sglang")
    if script is not None:
        first_line = Path(script).read_text(errors="replace").partition("\n")[0]
        if first_line.startswith("#!"):
            return first_line[2:].strip()
    raise ConfigError(
        "--inference_backend sglang: SGLang is not installed; install it in an environment of its "
        "own and put its `sglang` command on PATH, or give running servers with --inference_urls"
    )


def _embedded(
    inference: InferenceSection, *, model_path: Path, port: int, version: int, seed: int
) -> list[str]:
    argv = [sys.executable, "-m", "agentrl.inference.engine"]
    argv += ["--model-path", str(model_path), "--host", inference.inference_host]
    argv += ["--port", str(port), "--weight-version", str(version), "--seed", str(seed)]
    argv += ["--max-running-requests", str(inference.max_running_requests)]
    if inference.context_length is not None:
        argv += ["--context-length", str(inference.context_length)]
    if inference.inference_request_log is not None:
        argv += ["--log-requests", str(inference.inference_request_log)]
    if inference.inference_threads is not None:
        argv += ["--num-threads", str(inference.inference_threads)]
    return argv


def _sglang(
    inference: InferenceSection,
    model: ModelSection,
    *,
    model_path: Path,
    port: int,
    version: int,
    seed: int,
) -> list[str]:
    argv = [sglang_python(), sglang_starter.__file__, "--model-path", str(model_path)]
    argv += ["--served-model-name", model.model_name, "--host", inference.inference_host]
    argv += ["--port", str(port), "--weight-version", str(version), "--random-seed", str(seed)]
    argv += ["--tp-size", str(inference.inf_tp_size)]
    if inference.inf_ep_size > 1:
        argv += ["--ep-size", str(inference.inf_ep_size)]
    argv += ["--mem-fraction-static", str(inference.inf_mem_ratio)]
    argv += ["--max-running-requests", str(inference.max_running_requests)]
    argv += ["--sampling-defaults", "openai"]
    if inference.colocated:
        argv.append("--enable-memory-saver")
    if model.router_replay:
        argv.append("--enable-return-routed-experts")
    if inference.tool_call_parser in _SGLANG_TOOL_CALL_PARSERS:
        # Only for others who chat with the server: rollouts exchange token ids and parse themselves.
        argv += ["--tool-call-parser", inference.tool_call_parser]
    if inference.context_length is not None:
        argv += ["--context-length", str(inference.context_length)]
    if model.lora_rank:
        # Room for adapters is made at the start, before there is any.
        argv += ["--enable-lora", "--max-lora-rank", str(model.lora_rank)]
        argv += ["--lora-target-modules", *model.lora_target_modules]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    return argv + shlex.split(inference.sglang_args)
