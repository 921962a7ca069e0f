"""What the pages for contributors name exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/decisions/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|scripts)/[\w/.-]*)`", page.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_objects_exist(page: Path) -> None:
    for name in re.findall(r"`(agentrl(?:\.\w+)+)`", page.read_text()):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_contributing_names_what_the_code_has() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path, names in {
        "algorithms/losses.py": ("LossKind", "LossSettings", "policy_loss"),
        "algorithms/reductions.py": ("Reduction",),
        "config/sections/training_sections.py": ("AlgorithmSection",),
        "config/sections/sampling_sections.py": ("inference_backend",),
        "models/architectures.py": ("SUPPORTED_MODEL_TYPES",),
        "renderers/tool_calls/formats.py": ("ToolCallFormat",),
        "integrations/agent_trainer.py": ("ENGINES", "register_processor"),
        "integrations/trainer_processor.py": ("TrainerProcessor",),
    }.items():
        source = (ROOT / "src/agentrl" / path).read_text()
        for name in names:
            assert name in text, f"the page no longer mentions {name}"
            assert name in source, f"{path} no longer has {name}"
