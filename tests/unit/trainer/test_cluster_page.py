"""The commands of docs/cluster.md are ones that their launchers, our flags and the models take."""

import shlex
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from support.doc_blocks import DOCS
from torch.distributed.run import get_args_parser
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from agentrl.config.command_line import parse_flags
from agentrl.models.checkpoints.architectures import check_parallel_support
from agentrl.trainer.bootstrap import mesh_shape

# What the models' own config.json says.
COMMON: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
MODELS: dict[str, PretrainedConfig] = {
    "Qwen/Qwen3-0.6B": Qwen3Config(**COMMON, num_attention_heads=16, intermediate_size=3072),
    "Qwen/Qwen3-4B": Qwen3Config(**COMMON, num_attention_heads=32, intermediate_size=9728),
    "Qwen/Qwen3-32B": Qwen3Config(**COMMON, num_attention_heads=64, intermediate_size=25600),
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(
        **COMMON | {"num_key_value_heads": 4},
        num_attention_heads=32,
        intermediate_size=6144,
        num_experts=128,
    ),
}


def commands() -> list[list[str]]:
    page = (DOCS / "cluster.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0]
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line and line[0] != "#"]


def launched(words: list[str]) -> tuple[int, str, list[str]]:
    """Number of processes, module and its arguments, by the launcher's own parser."""
    if words[0] == "torchrun":
        taken = get_args_parser().parse_args(words[1:])
        assert taken.module
        return int(taken.nproc_per_node), taken.training_script, taken.training_script_args
    assert words[:2] == ["accelerate", "launch"]
    taken = launch_command_parser().parse_args(words[2:])
    assert taken.module
    return taken.num_processes, taken.training_script, taken.training_script_args


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_commands_for_eight_gpus_fit_their_models(words: list[str]) -> None:
    world_size, module, (command, *flags) = launched(words)
    assert (world_size, module, command) == (8, "agentrl", "train")
    config = parse_flags(flags)
    shape = mesh_shape(config.trainer, world_size)
    assert shape.world_size == 8
    model = MODELS[config.model.model_name_or_path]
    check_parallel_support(model, shape)
    assert not config.model.router_replay or hasattr(model, "num_experts")


def test_every_size_of_model_has_a_command() -> None:
    named = {word for words in commands() for word in words if word.startswith("Qwen/")}
    assert named == MODELS.keys()
