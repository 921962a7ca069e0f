"""What every figure of a run is called, its unit, what it means, and what to do about it.

The one table, `figures.yaml`, behind the inspector, `agentrl inspect`, the Prometheus help texts and
docs/metrics.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class FigureWords:
    """One figure in words."""

    name: str
    unit: str
    meaning: str
    """What it is."""
    advice: str
    """What is healthy, and what to do otherwise."""


_FILE = Path(__file__).with_name("figures.yaml")
# The loader in C takes a tenth of the time; not every build of PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

TABLES: Mapping[str, Mapping[str, FigureWords]] = {
    table: {key: FigureWords(**words) for key, words in figures.items()}
    for table, figures in yaml.load(_FILE.read_text(encoding="utf-8"), _LOADER).items()
}
STEP_FIGURES = TABLES["step"]
EVAL_FIGURES = TABLES["eval"]
QUEUE_FIGURES = TABLES["queue"]
SAMPLER_FIGURES = TABLES["sampler"]
TRAINER_TOTALS = TABLES["trainer"]
