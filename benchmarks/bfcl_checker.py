"""What the Function Calling Leaderboard's checkers say of its references, through `--env bfcl:`.

    python benchmarks/bfcl_checker.py

Every question of every category is played twice by the environment's own process: with the calls
of its reference, which must be right, and with empty replies, which are right only where no call
is. Each conversation is also read back in the call format of the demo's model, as fine-tuning
does. `unscorable` lists the references that the official checker refuses.
"""

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # wherever the command was started

from harness.results import parser, report

from agentrl.plugins.sft.demonstrations.demonstration import (
    demonstration_turns,
    read_demonstrations,
)
from agentrl.renderers.renderer import Renderer
from examples.bfcl.demonstrations import Message, Oracle, played

MODEL = Path(__file__).resolve().parents[1] / "assets/demo/model"
CATEGORIES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel"),
    *("parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel"),
    *("live_parallel_multiple", "live_irrelevance", "live_relevance", "multi_turn_base"),
    *("multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context"),
)


class Silent(Oracle):
    """Says nothing."""

    def __call__(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Return an empty reply."""
        return {"role": "assistant", "content": ""}


def measured(category: str, python: Path | None = None) -> dict[str, Any]:
    """Return the figures of a category."""
    answered = list(played(f"bfcl:{category}", python))
    silent = [score for _, score, _ in played(f"bfcl:{category}", python, Silent)]
    return {
        "rows": len(answered),
        "references_right": sum(score == 1.0 for _, score, _ in answered),
        "references_read_back": sum(1 for _ in _read_back([oracle for _, _, oracle in answered])),
        "empty_right": sum(score == 1.0 for score in silent),
        "unscorable": [number for number, score, _ in answered if score != 1.0],
    }


def _read_back(oracles: Sequence[Oracle]) -> Iterator[str]:
    """Yield the conversations whose calls are the same after call format and parser.

    Raises:
        RenderError: the calls of one are not.
    """
    renderer = Renderer.load(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talks.jsonl"
        shown = [{"messages": one.messages, "tools": one.tools} for one in oracles]
        path.write_text("".join(f"{json.dumps(one)}\n" for one in shown), encoding="utf-8")
        for talk in read_demonstrations(path):
            demonstration_turns(talk, renderer, record_id=talk.id, task_id=talk.id)
            yield talk.id


def measure(_: Namespace) -> dict[str, Any]:
    """Return the figures of all categories."""
    return {category: measured(category) for category in CATEGORIES}


if __name__ == "__main__":
    report(parser(__doc__, "bfcl_checker"), measure)
