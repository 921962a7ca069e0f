"""Writes docs/metrics.md, the page of all figures, from their one table.

.venv/bin/python scripts/metrics_page.py            write the page
.venv/bin/python scripts/metrics_page.py --check    fail if the page differs
"""

import re
import sys
from collections.abc import Iterator

from written_page import ROOT, write_or_check

from agentrl.runtime.telemetry.figure_words import TABLES

PAGE = ROOT / "docs/metrics.md"
INTRODUCTION = """\
# Figures in words

<!-- Written by scripts/metrics_page.py from src/agentrl/runtime/telemetry/figures.yaml. -->

Every figure that a run writes, by the name that the inspector shows, with its unit, its meaning, what is
healthy, and what to do otherwise. The limits are rules of thumb: compare a run first of all with itself.
[Monitoring](monitoring.md) says where the figures go, and
[Troubleshooting](troubleshooting.md) starts from symptoms.
"""
SECTIONS = {
    "step": (
        "Steps",
        "Keys of `metrics.jsonl`, of the trackers, and of `agentrl inspect step N --json`. Prometheus serves "
        "those of the last step as `agentrl_trainer_KEY`.",
    ),
    "eval": (
        "Evaluations",
        "Keys of an evaluation in `summary.json`; trackers receive them as `eval/KEY`, and the loss of "
        "fine-tuning as `eval_loss`. Prometheus serves `agentrl_trainer_eval_reward_mean`.",
    ),
    "queue": ("Queue", "The state of the run as a whole, on the run's page of the inspector."),
    "sampler": ("Samplers", "Prometheus metrics `agentrl_sampler_KEY`; counters end in `_total`."),
    "trainer": (
        "Totals of the trainer",
        "Prometheus metrics `agentrl_trainer_KEY`; counters end in `_total`.",
    ),
}


def written() -> Iterator[str]:
    """Yield the pieces of the page."""
    yield INTRODUCTION
    for table, (title, text) in SECTIONS.items():
        yield f"\n## {title}\n\n{text}\n\n"
        yield "| figure | key | unit | meaning | healthy, and what to do otherwise |\n"
        yield "|---|---|---|---|---|\n"
        for key, words in TABLES[table].items():
            advice = re.sub(r"(?<!`)(--\w+( \d\S*)?)", r"`\1`", words.advice)
            meaning = re.sub(r"(--\w+)", r"`\1`", words.meaning)
            yield f"| {words.name} | `{key}` | {words.unit} | {meaning} | {advice} |\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, written(), description=__doc__, source="table"))
