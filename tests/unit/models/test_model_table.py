"""What docs/models.md says of a family, measured again."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from model_table import BEGIN, END, NAMES, PAGE, is_within, measured

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*falling back to its reference PyTorch implementation"
)


def marks(family: str) -> list[pytest.MarkDecorator]:
    return [] if family == "lfm2" else [pytest.mark.slow]


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_a_family_is_trained_served_and_exported_exactly(family: str) -> None:
    figures = measured(family, seed=0)
    assert is_within(family, figures), figures


def test_the_page_has_a_row_a_family() -> None:
    rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [*NAMES]


@pytest.mark.slow
def test_the_script_prints_one_object_and_names_unknown_families() -> None:
    script = ROOT / "scripts/model_table"
    done = subprocess.run(
        [script, "--families", "qwen3", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["qwen3"]["export_equal"] is True
    refused = subprocess.run([script, "--families", "qwen9"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "unknown: qwen9; known: llama" in refused.stderr
