"""SGLang as inference server: in this environment, or in that of the `sglang` command."""

import contextlib
import importlib.metadata
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.sections import InferenceSection, ModelSection
from agentrl.errors import ConfigError
from agentrl.inference.supervisor.script_interpreter import script_interpreter
from agentrl.inference.supervisor.starters import sglang_starter
from agentrl.inference.wire import MAX_INT32
from agentrl.runtime.gpus import seen_gpus

_SGLANG_TOOL_CALL_PARSERS = frozenset(
    {
        *("deepseekv3", "deepseekv31", "kimi_k2", "llama3", "mistral", "pythonic"),
        *("qwen", "qwen25", "qwen3_coder"),
    }
)

_WITHOUT_PRIORITIES = ("--schedule-policy", "--enable-metrics")
"""Flags of SGLang that priorities do not go with: it refuses them with most policies, and its metrics
would have a series for every priority."""
_MAX_STATIC_FRACTION = 0.95
"""Of the free memory; passes and CUDA graphs need the rest."""


class SGLangBackend:
    """Starts SGLang servers."""

    start_seconds = 1800.0
    """Loading a large model and capturing its CUDA graphs takes long."""

    def command(
        self, common: Sequence[str], *, inference: InferenceSection, model: ModelSection, seed: int
    ) -> list[str]:
        """Return the argv of a server; see `ServerBackend`."""
        starter = [*sglang_python(), sglang_starter.__file__]
        return [*starter, *common, "--random-seed", str(seed), *_sglang_flags(inference, model)]


SGLANG = SGLangBackend()


def sglang_python() -> list[str]:
    """Return what starts Python with SGLang: this interpreter, or that of the `sglang` command."""
    # Look for the distribution, because a local folder or file may be a module named `sglang`.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("sglang")
        return [sys.executable]
    script = shutil.which("sglang")
    if script is not None:
        return script_interpreter(Path(script))
    raise ConfigError(
        "--inference_backend sglang: SGLang is not installed; install it in its own environment "
        "and put its `sglang` command on PATH, or pass running servers with --inference_urls"
    )


def _static_fraction(inference: InferenceSection) -> float:
    """Return the fraction for SGLang, which relates it to the memory that is free at its start.

    A server that is restarted beside a trainer finds less of it free.
    """
    sizes = [(gpu.total_mib, gpu.used_mib) for gpu in seen_gpus()]
    free = [1 - used / total for total, used in sizes if total and used is not None]
    if not inference.share_gpus or not free:
        return inference.inf_mem_ratio
    return round(min(inference.inf_mem_ratio / max(min(free), 0.01), _MAX_STATIC_FRACTION), 3)


def _sglang_flags(inference: InferenceSection, model: ModelSection) -> list[str]:
    argv = ["--served-model-name", model.model_name, "--tp-size", str(inference.inf_tp_size)]
    if inference.inf_ep_size > 1:
        argv += ["--ep-size", str(inference.inf_ep_size)]
    argv += ["--mem-fraction-static", str(_static_fraction(inference))]
    argv += ["--sampling-defaults", "openai"]
    own_argv = shlex.split(inference.sglang_args)
    if not any(argument.startswith(_WITHOUT_PRIORITIES) for argument in own_argv):
        argv += ["--enable-priority-scheduling"]
        # Nothing that runs is interrupted for what waits.
        argv += ["--priority-scheduling-preemption-threshold", str(MAX_INT32)]
    if inference.colocated:
        argv.append("--enable-memory-saver")
    if model.router_replay:
        argv.append("--enable-return-routed-experts")
    if inference.tool_call_parser in _SGLANG_TOOL_CALL_PARSERS:
        # For third-party chat requests; rollouts exchange token ids and parse the text themselves.
        argv += ["--tool-call-parser", inference.tool_call_parser]
    if model.lora_rank:
        # The server reserves memory for adapters at its start, before any is loaded.
        argv += ["--enable-lora", "--max-lora-rank", str(model.lora_rank)]
        argv += ["--lora-target-modules", *model.lora_target_modules]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    return argv + own_argv
