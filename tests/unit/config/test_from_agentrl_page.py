"""docs/from-agentrl.md says of the original's flags what the code does with them."""

import dataclasses
import re
import shlex

import pytest
from support.doc_blocks import DOCS
from transformers import TrainingArguments

from agentrl.config.command_line import parse_flags
from agentrl.config.flags import (
    ALIASES,
    FLAGS,
    NO_EFFECT,
    ONE_VALUE,
    OPTIM_PARTS,
    ORIGINAL,
    SETTINGS,
    SHORTHANDS,
    canonical_name,
)

PAGE = (DOCS / "from-agentrl.md").read_text()
ELSEWHERE = (DOCS / "coming-from.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| `--")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_defaults_here_are_those_of_the_page() -> None:
    table = rows("Defaults that differ")
    assert len(table) > 15
    for flag, theirs, ours, *_ in table:
        default = SETTINGS[flag.strip("`-")].field.default
        shown = "none" if default is None else str(default).lower()
        assert (flag, shown) == (flag, ours.lower())
        assert theirs.lower() != shown


@pytest.mark.parametrize(
    "name", ["balance_sample", "reserve_context_error_count", "resample_error_records"]
)
def test_defaults_that_change_what_is_trained_on_are_named(name: str) -> None:
    assert name in {row[0].strip("`-") for row in rows("Defaults that differ")}


def test_flags_without_effect_are_all_listed() -> None:
    listed = section("Flags").partition("Accepted without effect")[2]
    assert set(re.findall(r"`--(\w+)`", listed)) == NO_EFFECT.keys()


def test_flags_that_differ_are_known() -> None:
    known = {*FLAGS, *ORIGINAL, *ONE_VALUE, *SHORTHANDS}
    for row in rows("Flags"):
        for name in re.findall(r"--(\w+)", row[0]):
            assert canonical_name(name) in known or f"`{name}`" in ELSEWHERE, name


# Of Transformers 4.57, on which the original builds; version 5 has dropped them.
DROPPED_ARGUMENTS = """
adafactor fp16_backend fp16_opt_level fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
group_by_length half_precision_backend include_inputs_for_metrics include_tokens_per_second
jit_mode_eval logging_dir mp_parameters no_cuda overwrite_output_dir past_index
per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization
push_to_hub_token ray_scope save_safetensors torchdynamo tpu_metrics_debug tpu_num_cores
use_legacy_prediction_loop use_mps_device warmup_ratio
"""


def test_every_argument_of_transformers_is_accepted_or_explained() -> None:
    known = {*FLAGS, *ORIGINAL, *ALIASES, *NO_EFFECT, *ONE_VALUE, *OPTIM_PARTS, *SHORTHANDS}
    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert len(names) > 100
    names |= set(DROPPED_ARGUMENTS.split())
    exact = set(re.findall(r"`(\w+)`", ELSEWHERE))
    beginnings = tuple(re.findall(r"`(\w+)\*`", ELSEWHERE))
    assert {one for one in names - known - exact if not one.startswith(beginnings)} == set()


def test_the_originals_command_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    block = section("Programs").partition("```bash\n")[2].partition("```")[0]
    program, command, *flags = shlex.split(block.replace("\\\n", " "))
    assert (program, command) == ("agentrl", "run")
    config = parse_flags([word for word in flags if word != "--dry_run"])
    assert config.algorithm.loss_calculator == "MINIRL"
    assert "--compress_history has no effect here" in capsys.readouterr().err
