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

`--demonstrations 1000` instead renders random demonstrations to learn from (calls with nested
arguments, parallel calls, thinking, empty content, unicode, images where the model reads them) and
reads every reply again: `back` counts those whose replies all gave the same calls, thinking and
content; `refused` the others, by the field that the refusal names; `failed` must be 0.
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
    parser.add_argument("--demonstrations", type=int, default=0, help="test these instead")
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
        found[name] = (
            demonstrated(name, options.demonstrations)
            if options.demonstrations
            else measured(name, options.conversations)
        )
        if not options.json:
            print(name, found[name], flush=True)
    if options.json:
        print(json.dumps(found))
    return int(any(figures["failed"] for figures in found.values()))


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
        "failed": held.inexact,
        "appended": round(held.appended / max(held.answered, 1), 3),
    }
    if held.first_failure:
        figures["first_failure"] = held.first_failure
    return figures


def demonstrated(name: str, num_demonstrations: int) -> dict[str, Any]:
    """Return what became of demonstrations in a family's template."""
    from harness.chat_play import model  # noqa: PLC0415
    from harness.demonstration_play import held  # noqa: PLC0415

    counts = held(model(name).renderer, num_demonstrations)
    figures: dict[str, Any] = {
        "demonstrations": counts.demonstrations,
        "replies": counts.replies,
        "back": counts.there_and_back,
        "refused": counts.refused,
        "failed": counts.wrong,
    }
    return figures | ({"first_failure": counts.first_wrong} if counts.first_wrong else {})


if __name__ == "__main__":
    sys.exit(main())
