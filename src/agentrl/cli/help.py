"""Help texts made from the configuration sections."""

import importlib
import textwrap

from agentrl.cli.arguments import usage
from agentrl.config.flags import FLAGS, NO_EFFECT
from agentrl.config.sections import SECTIONS

_USED_SECTIONS = {
    "run": tuple(SECTIONS),
    "sample": (
        *("run", "model", "store", "data", "sampling", "rollout", "tools", "agents", "inference"),
    ),
    "train": (
        *("run", "model", "store", "data", "sampling", "rollout", "inference"),
        *("algorithm", "trainer", "publish"),
    ),
    "sft": ("run", "model", "store", "data", "algorithm", "trainer"),
    "serve": ("run", "model", "store", "inference", "publish"),
    "eval": (
        *("run", "model", "store", "data", "sampling", "rollout", "tools", "agents", "inference"),
    ),
    "export": ("run", "model"),
    "tasks": ("run", "store", "data", "rollout"),
    "inspect": ("run", "store"),
    "store": ("run", "store", "rollout"),
    "verify": ("run", "model"),
    "env": ("tools",),
}

_OWN_FLAGS = {
    "export": (
        "Takes the newest checkpoint below --output_dir and writes `merged` beside it. "
        "--model_name_or_path is only needed where the base model was moved.",
    ),
    "sft": (
        "Conversations (--train_file, --eval_file) are objects with `messages` in OpenAI form, "
        "and perhaps `tools`; see docs/sft.md.",
    ),
    "verify": (
        "--trees N  Random trees to compare on. [8]",
        "--dtype float64|float32  Precision of the comparison. [float64]",
        "--json  Print one JSON object; `max_relative_gradient_error` is the figure.",
        "Without --model_name_or_path, small random models are taken.",
    ),
}
_ACTIONS = {
    "env": "agentrl.cli.env",
    "inspect": "agentrl.cli.inspect",
    "store": "agentrl.cli.store",
}
"""Commands whose actions take words and switches of their own."""


def command_help(command: str, summary: str) -> str:
    """Return a command's help: every flag of the sections it uses, with defaults in brackets."""
    lines = [f"agentrl {command}: {summary}", ""]
    if command in _ACTIONS:
        lines += [*usage(command, importlib.import_module(_ACTIONS[command]).ACTIONS), ""]
    lines.append("Flags are the same for every command; --config FILE reads them from YAML.")
    if command in _OWN_FLAGS:
        lines += ["", *(f"  {text}" for text in _OWN_FLAGS[command])]
    for section in _USED_SECTIONS[command]:
        lines += ["", f"{section}: {(SECTIONS[section].__doc__ or '').strip()}"]
        for flag in FLAGS.values():
            if flag.section == section:
                lines += textwrap.wrap(
                    f"--{flag.name}  {flag.help}",
                    100,
                    initial_indent="  ",
                    subsequent_indent=" " * 8,
                )
    if command == "run":
        lines += ["", f"accepted without effect: {', '.join(NO_EFFECT)}"]
    return "\n".join(lines)
