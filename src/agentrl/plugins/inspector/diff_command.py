"""`agentrl diff`: what two versions of a policy would decide differently, without sampling."""

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from agentrl.config.command_line import Count, FlagCommand, given_flags
from agentrl.config.sections import RootConfig
from agentrl.runtime.printable import one_line, printable_json


@click.command("diff", cls=FlagCommand, sections=("run", "store"))
@click.argument("run")
@click.option("--from", "start", metavar="MODEL", required=True, help="Version, or other model.")
@click.option("--to", "end", metavar="MODEL", required=True, help="The model to compare it with.")
@click.option(
    "--where",
    metavar="CONDITION",
    default="",
    help="Records to read, such as 'tool = price and score < 0.5'; by default all.",
)
@click.option("--limit", type=Count(), default=2000, help="Maximum number of records. [2000]")
@click.option(
    "--fail_if",
    metavar="CONDITION",
    help="Exit status 1 if it holds: flips[tool=refund] > 0.01, or calls, kl or greedy.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def diff(
    context: click.Context,
    /,
    config: RootConfig,
    run: str,
    fail_if: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare two models decision by decision, on the turns that a run stored (docs/diff.md).

    RUN is the run's name or its output directory. Forward passes only: nothing is sampled, and no
    tool is called.
    """
    from agentrl.plugins.inspector.diff_condition import DiffCondition
    from agentrl.plugins.inspector.diff_page import diff_page
    from agentrl.plugins.inspector.diff_run import diff_policies
    from agentrl.plugins.inspector.lines import show
    from agentrl.runtime.logs import setup_logging

    condition = None if fail_if is None else DiffCondition.parse(fail_if)
    setup_logging("diff")
    given = {name: value for name, value in given_flags(context).items() if name != "config"}
    found = diff_policies(run, **{**given, **options})
    figure = None if condition is None else condition.figure(found)
    if as_json:
        print(printable_json(json.dumps(asdict(found), ensure_ascii=False)))
    else:
        show(diff_page(found))
    if condition is None or figure is None or not condition.holds(figure):
        return 0
    line = f"agentrl diff: {condition} is {figure:.6g} {condition.comparison} "
    print(one_line(f"{line}{condition.number:g}"), file=sys.stderr)
    return 1
