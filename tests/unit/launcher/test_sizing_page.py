"""The commands of docs/sizing.md are parsed, planned and placed as the page says."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.doc_blocks import DOCS

from agentrl.cli.main import main

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "assets/demo"
PAGE = (DOCS / "sizing.md").read_text()
SECTIONS = re.findall(r"^## (\S+) on (one GPU|eight GPUs)\n(.*?)(?=^## )", PAGE, re.M | re.S)
CASES = {f"{model}-{size}": text for model, size, text in SECTIONS}
VOCABULARY, HEAD = 151_936, 128


@dataclass(frozen=True)
class Sizes:
    """What a model's own config.json says."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    kv_heads: int = 8

    @property
    def parameters(self) -> int:
        attention = self.hidden * HEAD * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden + 2 * HEAD
        layer = attention + 3 * self.hidden * self.mlp + norms
        return VOCABULARY * self.hidden + self.layers * layer + self.hidden

    def write(self, path: Path) -> None:
        """Write a checkpoint as far as checks look at it."""
        path.mkdir(parents=True)
        config = json.loads((DEMO / "model/config.json").read_text()) | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD,
            "intermediate_size": self.mlp,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 40_960,
            "layer_types": ["full_attention"] * self.layers,
        }
        (path / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (DEMO / "model" / file).exists():
                (path / file).write_bytes((DEMO / "model" / file).read_bytes())
        (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


MODELS = {
    "Qwen3-0.6B": Sizes(hidden=1024, layers=28, heads=16, mlp=3072),
    "Qwen3-4B": Sizes(hidden=2560, layers=36, heads=32, mlp=9728),
}


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page takes for granted: the models, questions, tools and SGLang."""
    (folder / "sglang").write_text(f"#!{sys.executable}\n")
    (folder / "sglang").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    (folder / "questions.jsonl").write_text('{"id": "a", "query": "q", "answer": "1"}\n')
    (folder / "tools.py").touch()
    return folder


def test_two_models_have_a_command_for_one_gpu_and_for_eight() -> None:
    sizes = ("one GPU", "eight GPUs")
    assert set(CASES) == {f"{model}-{size}" for model in MODELS for size in sizes}


@pytest.mark.parametrize("case", CASES)
def test_a_command_starts_on_the_machine_that_it_is_for(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CASES[case]
    model = case.rpartition("-")[0]
    MODELS[model].write(folder / "Qwen" / model)
    command, shown = re.findall(r"```\w*\n(.*?)```", text, re.S)
    program, word, *flags = shlex.split(command.replace("\\\n", " "))
    assert (program, word) == ("agentrl", "run")
    assert main(["run", *flags, "--dry_run", "--json"]) == 0, capsys.readouterr()
    parts = json.loads(capsys.readouterr().out)
    assert [f"  {name:12} {words}" for name, words in parts["gpus"].items()] == shown.splitlines()
    values = {name: entry["value"] for name, entry in parts["configuration"].items()}
    assert values["num_gpus"] == (8 if "eight" in case else 1)
    assert values["max_prompt_tokens"] + values["max_new_tokens"] <= 40_960
    assert not (folder / "output").exists()


def test_the_table_is_the_arithmetic_that_it_names() -> None:
    table = PAGE.partition("## Where the memory goes")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    found = [[re.findall(r"[\d.]+", cell)[0] for cell in row[1:]] for row in rows]
    formulas: tuple[Callable[[Sizes], int], ...] = (
        lambda model: 18 * model.parameters,
        lambda model: 16 * model.parameters,
        lambda model: 16_384 * model.layers * model.hidden * 2,
        lambda model: 1024 * VOCABULARY * 10,
        lambda model: 12 * model.parameters,
        lambda model: 2 * model.parameters,
        lambda model: 16_384 * model.layers * 2 * model.kv_heads * HEAD * 2,
    )
    computed = [[f"{each(model) / 1e9:.1f}" for model in MODELS.values()] for each in formulas]
    assert found == computed
