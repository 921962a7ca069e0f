"""Write the tracker's questions, each with a database and the state in which it must end.

python make_questions.py --seed 0        # data/train.jsonl, data/eval.jsonl, data/worlds
"""
# ruff: noqa: D103  the text of a kind of question describes its function

import argparse
import copy
import json
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # wherever the command was started

from examples.tracker.tracker import LABELS, MILESTONES, PEOPLE, State, write_state

DATA = Path(__file__).resolve().parent / "data"
NUM_TRAIN, NUM_EVAL = 300, 60
PARTS = ("Login", "Search", "Export", "Upload", "Billing", "Sync", "Editor", "Calendar", "Inbox")
PROBLEMS = (
    "fails on Android",
    "is slow",
    "shows no error",
    "loses the last line",
    "needs a button",
)
NEW_TITLES = tuple(f"Settings {problem}" for problem in PROBLEMS)
COMMENTS = ("I see it, too.", "Not on my machine.", "Since the last update.", "Can wait.")
NEXT_OPENED = "2026-12-01"


@dataclass(frozen=True)
class Errand:
    """What a question asks for.

    Attributes:
        query: the question.
        changes: `(issue, field, value)` that the errand makes; a new issue has the number 0.
        answer: right answer, if the question asks for one.
        look: the call that finds the issues, if the question does not name them.
    """

    query: str
    changes: list[tuple[int, str, Any]] = field(default_factory=list)
    answer: str = ""
    look: tuple[str, dict[str, Any]] | None = None


class Draw:
    """Random choices in one world."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.state = self._world()

    def _world(self) -> State:
        draw, state = self.random, State()
        titles = draw.sample([f"{part} {problem}" for part in PARTS for problem in PROBLEMS], 9)
        days = iter(draw.sample(range(300), 9))
        for number, title in zip(sorted(draw.sample(range(10, 100), 9)), titles, strict=True):
            month, day = divmod(next(days), 30)
            comments = draw.sample(COMMENTS, draw.randrange(4))
            state[str(number)] = {
                "title": title,
                "status": draw.choice(("open", "open", "closed")),
                "assignee": draw.choice((*PEOPLE, "")),
                "milestone": draw.choice((*MILESTONES, "")),
                "opened": f"2026-{month + 1:02}-{day + 1:02}",
                "duplicate_of": None,
                "labels": sorted(draw.sample(LABELS, draw.randrange(3))),
                "comments": [f"{draw.choice(PEOPLE)}: {text}" for text in comments],
            }
        return state

    def issue(self, **wanted: Any) -> int:
        """Return an issue with these fields; any one is given them if there is none."""
        found = self.issues(**wanted)
        number = self.random.choice(found or self.issues())
        self.state[str(number)].update(wanted)
        return number

    def issues(self, **wanted: Any) -> list[int]:
        """Return the issues with these fields, oldest first; `label` is one of the labels."""
        label = wanted.pop("label", None)
        found = [
            int(number)
            for number, one in self.state.items()
            if all(one[name] == value for name, value in wanted.items())
            and label in (None, *one["labels"])
        ]
        return sorted(found, key=lambda number: str(self.state[str(number)]["opened"]))

    def some(self, **wanted: Any) -> list[int]:
        """Return the issues with these fields, at least one, which are open."""
        self.issue(**{name: value for name, value in wanted.items() if name != "label"})
        if "label" in wanted and not self.issues(**wanted):
            rest = {name: value for name, value in wanted.items() if name != "label"}
            self.state[str(self.issues(**rest)[0])]["labels"] = [wanted["label"]]
        return self.issues(**wanted)


Kind = Callable[[Draw], Errand]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Add a kind of question."""
    KINDS[function.__name__] = function
    return function


def listed(**filters: str) -> tuple[str, dict[str, Any]]:
    """Return the call that lists issues."""
    return "list_issues", filters


DIRECT: dict[str, tuple[str, dict[str, Any], str, tuple[Any, ...]]] = {
    "close": ("Close issue {n}.", {"status": "open"}, "status", ("closed",)),
    "reopen": ("Issue {n} is back: reopen it.", {"status": "closed"}, "status", ("open",)),
    "assign": ("Assign issue {n} to {value}.", {"assignee": ""}, "assignee", PEOPLE),
    "unassign": ("Assign issue {n} to nobody.", {"assignee": "noor"}, "assignee", ("",)),
    "move": ("Move issue {n} to {value}.", {"milestone": ""}, "milestone", MILESTONES),
    "rename": ('Rename issue {n} to "{value}".', {}, "title", NEW_TITLES),
    "label": ("Label issue {n} as ui.", {"labels": ["docs"]}, "labels", (["docs", "ui"],)),
    "unlabel": (
        "Issue {n} is not urgent: remove the label.",
        {"labels": ["bug", "urgent"]},
        "labels",
        (["bug"],),
    ),
}
"""Questions that name an issue and a field: text, fields before, the field, its values after."""


def direct(name: str) -> Kind:
    """Return the kind of question that a line of the table describes."""
    text, before, changed, values = DIRECT[name]

    def errand(draw: Draw) -> Errand:
        number, value = draw.issue(**before), draw.random.choice(values)
        return Errand(text.format(n=number, value=value), [(number, changed, value)])

    return errand


KINDS.update({name: direct(name) for name in DIRECT})


@kind
def note(draw: Draw) -> Errand:
    number, text = draw.issue(), draw.random.choice(("Fixed in main.", "Please retest.", "Why?"))
    changes = [(number, "comments", [*draw.state[str(number)]["comments"], f"agent: {text}"])]
    return Errand(f'Comment on issue {number}: "{text}"', changes)


@kind
def create(draw: Draw) -> Errand:
    title, name = draw.random.choice(NEW_TITLES), draw.random.choice(LABELS)
    new = [(0, "title", title), (0, "labels", [name])]
    return Errand(f'Create an issue "{title}" with the label {name}.', new)


@kind
def merge(draw: Draw) -> Errand:
    number = draw.issue(status="open")
    into = draw.random.choice([other for other in draw.issues() if other != number])
    changes = [(number, "duplicate_of", into), (number, "status", "closed")]
    return Errand(f"Issue {number} is a duplicate of {into}: merge it.", changes)


@kind
def close_by_title(draw: Draw) -> Errand:
    number = draw.issue(status="open")
    title = draw.state[str(number)]["title"]
    look = ("search_issues", {"text": title})
    return Errand(f'Close the issue "{title}".', [(number, "status", "closed")], look=look)


@kind
def close_milestone(draw: Draw) -> Errand:
    name = draw.random.choice(MILESTONES)
    changes = [(n, "status", "closed") for n in draw.some(milestone=name, status="open")]
    look = listed(status="open", milestone=name)
    return Errand(f"Close all open issues of milestone {name}.", changes, look=look)


@kind
def assign_oldest(draw: Draw) -> Errand:
    user = draw.random.choice(PEOPLE)
    number = draw.some(status="open", label="bug")[0]
    draw.state[str(number)]["assignee"] = ""
    look = listed(status="open", label="bug")
    return Errand(f"Assign the oldest open bug to {user}.", [(number, "assignee", user)], look=look)


@kind
def hand_over(draw: Draw) -> Errand:
    old, new = draw.random.sample(PEOPLE, 2)
    changes = [(n, "assignee", new) for n in draw.some(assignee=old, status="open")]
    look = listed(status="open", assignee=old)
    return Errand(f"Give all open issues of {old} to {new}.", changes, look=look)


@kind
def note_count(draw: Draw) -> Errand:
    number, name = draw.issue(), draw.random.choice(LABELS)
    text = f"agent: {len(draw.issues(status='open', label=name))}"
    changes = [(number, "comments", [*draw.state[str(number)]["comments"], text])]
    query = f"Comment on issue {number} with the number of open issues with the label {name}."
    return Errand(query, changes, look=listed(status="open", label=name))


@kind
def count_open(draw: Draw) -> Errand:
    name = draw.random.choice(LABELS)
    answer = str(len(draw.issues(status="open", label=name)))
    query = f"How many open issues have the label {name}?"
    return Errand(query, answer=answer, look=listed(status="open", label=name))


@kind
def count_of(draw: Draw) -> Errand:
    user = draw.random.choice(PEOPLE)
    answer = str(len(draw.issues(assignee=user)))
    return Errand(f"How many issues has {user}?", answer=answer, look=listed(assignee=user))


@kind
def count_comments(draw: Draw) -> Errand:
    number = draw.issue()
    answer = str(len(draw.state[str(number)]["comments"]))
    look = ("get_issue", {"number": number})
    return Errand(f"How many comments has issue {number}?", answer=answer, look=look)


@kind
def oldest(draw: Draw) -> Errand:
    name = draw.random.choice(LABELS)
    answer = str(draw.some(status="open", label=name)[0])
    query = f"What is the number of the oldest open issue with the label {name}?"
    return Errand(query, answer=answer, look=listed(status="open", label=name))


def after(state: State, changes: list[tuple[int, str, Any]]) -> State:
    """Return the state that changes lead to."""
    ended = copy.deepcopy(state)
    new = str(max(map(int, state)) + 1)
    empty = {"status": "open", "assignee": "", "milestone": "", "opened": NEXT_OPENED}
    for number, name, value in changes:
        if number == 0:
            ended.setdefault(new, {**empty, "duplicate_of": None, "labels": [], "comments": []})
        ended[str(number or new)][name] = value
    return ended


def rows(split: str, num: int, seed: int) -> Iterator[tuple[dict[str, Any], State]]:
    """Yield questions, and the worlds that they begin in."""
    for index in range(num):
        draw = Draw(f"{seed} {split} {index}")
        name = list(KINDS)[index % len(KINDS)]
        errand = KINDS[name](draw)
        yield (
            {
                "id": f"{split}-{index:03}",
                "query": errand.query,
                "answer": errand.answer or None,
                "scorer": "tracker",
                "tags": [name],
                "look": errand.look,
                "before": draw.state,
                "after": after(draw.state, errand.changes),
            },
            draw.state,
        )


def write_questions(folder: Path, seed: int = 0) -> None:
    """Write both question files, and the database of each question."""
    shutil.rmtree(folder / "worlds", ignore_errors=True)
    for split, num in (("train", NUM_TRAIN), ("eval", NUM_EVAL)):
        lines = []
        for row, state in rows(split, num, seed):
            world = folder / "worlds" / row["id"]
            world.mkdir(parents=True)
            memory, database = sqlite3.connect(":memory:"), world / "tracker.db"
            write_state(memory, state)
            database.write_bytes(memory.serialize())
            lines.append(json.dumps(row))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write the questions of a seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=DATA)
    args = parser.parse_args()
    write_questions(args.folder, args.seed)
    print(f"{NUM_TRAIN} questions and {NUM_EVAL} held-out ones in {args.folder}")


if __name__ == "__main__":
    main()
