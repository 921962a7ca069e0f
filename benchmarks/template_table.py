"""The table of chat templates: checks that each is recognized and continued token for token.

    scripts/template_table --conversations 1000 --templates FOLDER

Released templates come from the packages that contain them: those in TRL from its installation;
those of other families from the source archive of the package llama-cpp-python, whose folder
`vendor/llama.cpp/models/templates` is `--templates`. Each is tested with random conversations with
tools, text that looks like control tokens, truncated replies and noise:

- `exact`: conversations in which the prompts rebuilt from stored turns equal the engine's, id by
  id, no untrusted text became a control token, and every prompt equals the template's text;
- `appended`: share of calls whose results were appended to the ids as sampled. If it is below 1,
  the template itself writes the call differently than the model did.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings


@dataclass
class Held:
    """Results of the conversations with a template."""

    conversations: int = 0
    inexact: int = 0
    answered: int = 0
    appended: int = 0
    first_failure: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run conversations and print the results; 1 if one was inexact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", help="comma-separated; all available ones by default")
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--templates", type=Path, help="folder of templates that TRL lacks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.templates is not None:
        os.environ["AGENTRL_CHAT_TEMPLATES"] = str(options.templates)
    from harness.chat_families import REAL_FAMILIES  # noqa: PLC0415 - reads the variable

    available = [name for name, family in REAL_FAMILIES.items() if family.is_there]
    names = options.families.split(",") if options.families else available
    if unknown := sorted({*names} - {*available}):
        parser.error(f"not available: {', '.join(unknown)}; available: {', '.join(available)}")
    found = {}
    for name in names:
        found[name] = measured(name, options.conversations)
        if not options.json:
            print(name, found[name], flush=True)
    if options.json:
        print(json.dumps(found))
    return (
        0 if all(figures["exact"] == figures["conversations"] for figures in found.values()) else 1
    )


def measured(name: str, num_conversations: int) -> dict[str, Any]:
    """Return the figures of a family's template."""
    from harness.chat_play import Case, answered_by_tools, cases, failure_of, model, play  # noqa: PLC0415

    held = Held()

    @seed(0)
    @settings(
        max_examples=num_conversations,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(name))
    def hold(case: Case) -> None:
        held.conversations += 1
        played = play(one, case)
        if failure := failure_of(one, case, played):
            held.inexact += 1
            held.first_failure = held.first_failure or failure
        for turn in answered_by_tools(case, played):
            held.answered += 1
            held.appended += turn.branch_reason is None

    one = model(name)
    hold()
    figures: dict[str, Any] = {
        "template": one.family.template,
        "format": one.renderer.tool_call_format,
        "conversations": held.conversations,
        "exact": held.conversations - held.inexact,
        "appended": round(held.appended / max(held.answered, 1), 3),
    }
    if held.first_failure:
        figures["first_failure"] = held.first_failure
    return figures


if __name__ == "__main__":
    sys.exit(main())
