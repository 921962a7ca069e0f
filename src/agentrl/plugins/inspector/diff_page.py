"""A `PolicyDiff` as text for a terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from agentrl.plugins.inspector.lines import Rows, heading, labeled
from agentrl.plugins.inspector.policy_diff import PolicyDiff
from agentrl.runtime.printable import counted, one_line

_FLIPS_SHOWN = 10
_WISH_CHARS = 60


def diff_page(diff: PolicyDiff) -> RenderableType:
    """Return the figures, then choices, flips, tags and outcomes, the largest change first."""
    whole = diff.whole
    heads = {
        "decisions": f"{whole.num_decisions:,} of {counted(diff.num_records, 'record')}, in "
        f"{counted(diff.num_places, 'place')}; {whole.flips:.1%} flip",
        "moved": f"KL {whole.kl:.4f} nats per sampled token; {whole.greedy:.1%} of the likeliest "
        f"tokens differ; effective samples {diff.effective_from:.0%} -> {diff.effective_to:.0%}",
        "computed": f"{diff.tokens_computed:,} tokens for each model, "
        f"{diff.tokens_computed / diff.tokens_separate:.3f} of separate turns",
        "calls": f"{diff.as_written:.1%} begin with the tokens that stand for them",
    }
    choices = Rows("choice", ">calls", ">change", ">made", ">reply")
    made = {part.name: part for part in diff.choices}
    for name, change in whole.changes:
        calls = f"{whole.calls_from[name]:.3f} -> {whole.calls_to[name]:.3f}"
        number, reply = "0", ""
        if (own := made.get(name)) is not None:
            number, reply = f"{own.num_decisions:,}", f"{own.reply_from:.3f} -> {own.reply_to:.3f}"
        choices.add(name, calls, f"{change:+.4f}", number, reply)
    flips = Rows(
        *("from", "to", ">decisions", "tag", "outcome", ">probability", "+record", "+it writes")
    )
    for one in diff.flips[:_FLIPS_SHOWN]:
        chances = f"{one.probability_from:.2f} -> {one.probability_to:.2f}"
        record, wish = f"{one.record_id} turn {one.turn}", one_line(one.wish, _WISH_CHARS)
        kind = (one.before, one.after, f"{one.num_decisions:,}", one.tag, one.outcome)
        flips.add(*kind, chances, record, wish)
    pages: list[RenderableType] = [choices, flips if diff.flips else Text("no decision flips")]
    for title, parts in (("tag", diff.tags), ("outcome", diff.outcomes)):
        pages.append(table := Rows(title, ">decisions", ">flips", ">KL", ">likeliest", "calls"))
        for part in parts:
            shares = (f"{part.flips:.1%}", f"{part.kl:.4f}", f"{part.greedy:.1%}")
            most = "{} {:+.4f}".format(*part.changes[0])
            table.add(part.name, f"{part.num_decisions:,}", *shares, most)
    return Group(
        heading(f"run {diff.run}: {diff.start} -> {diff.end}"),
        *(labeled(*entry) for entry in heads.items()),
        *(line for page in pages for line in (Text(""), page)),
    )
