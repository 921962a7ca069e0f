"""An issue tracker on SQLite, as an MCP server.

Run it for one rollout, on its database, or as one process for all rollouts:

    python tracker.py tracker.db
    python tracker.py --worlds data/worlds --port 8800

The one process copies the database of the question that a session names (`X-AgentRL-Question`).
"""

import argparse
import json
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

SCHEMA = """
create table issues (number integer primary key, title text, status text, assignee text,
  milestone text, opened text, duplicate_of integer);
create table labels (issue integer, label text, primary key (issue, label));
create table comments (id integer primary key, issue integer, author text, body text);
"""
FIELDS = ("title", "status", "assignee", "milestone", "opened", "duplicate_of")
PEOPLE = ("mara", "noor", "ivo", "tess")
MILESTONES = ("1.0", "1.1", "2.0")
LABELS = ("bug", "feature", "docs", "ui", "urgent")

State = dict[str, dict[str, Any]]
"""Issues by number: their fields, `labels` and `comments`."""


def state_of(database: sqlite3.Connection) -> State:
    """Return everything that a tracker holds."""
    issues: State = {}
    for number, *values in database.execute(f"select number, {', '.join(FIELDS)} from issues"):
        issues[str(number)] = {
            **dict(zip(FIELDS, values, strict=True)),
            "labels": [],
            "comments": [],
        }
    for issue, label in database.execute("select issue, label from labels order by label"):
        issues[str(issue)]["labels"].append(label)
    for issue, author, body in database.execute(
        "select issue, author, body from comments order by id"
    ):
        issues[str(issue)]["comments"].append(f"{author}: {body}")
    return issues


def write_state(database: sqlite3.Connection, state: State) -> None:
    """Fill an empty tracker."""
    database.executescript(SCHEMA)
    for number, issue in state.items():
        values = [int(number), *(issue[field] for field in FIELDS)]
        database.execute("insert into issues values (?, ?, ?, ?, ?, ?, ?)", values)
        for label in issue["labels"]:
            database.execute("insert into labels values (?, ?)", (int(number), label))
        for comment in issue["comments"]:
            author, _, body = comment.partition(": ")
            database.execute(
                "insert into comments (issue, author, body) values (?, ?, ?)",
                (int(number), author, body),
            )
    database.commit()


server = MCPServer("tracker", log_level="WARNING")
_worlds: dict[str, Path] = {}
"""The only database; or, in the process for all rollouts, where fixtures and copies are."""


def _database(context: Context) -> sqlite3.Connection:
    path = _worlds.get("only")
    if path is None:
        headers = context.headers or {}
        path = _worlds["copies"] / f"{headers['mcp-session-id']}.db"
        if not path.exists():
            question = Path(unquote(headers["x-agentrl-question"])).name
            shutil.copy(_worlds["fixtures"] / question / "tracker.db", path)
    return sqlite3.connect(path, isolation_level=None)


def _issue(context: Context, number: int) -> sqlite3.Connection:
    database = _database(context)
    if database.execute("select 1 from issues where number = ?", (number,)).fetchone() is None:
        raise ToolError(f"there is no issue {number}")
    return database


def _known(value: str, values: tuple[str, ...], what: str) -> str:
    if value not in values:
        raise ToolError(f"there is no {what} {value!r} (known: {', '.join(values)})")
    return value


def _lines(issues: State, numbers: list[str]) -> str:
    found = "1 issue" if len(numbers) == 1 else f"{len(numbers)} issues"
    lines = [
        f"#{number} {one['title']} | {one['status']} | {one['assignee'] or 'nobody'} | "
        f"{one['milestone'] or 'no milestone'} | {' '.join(one['labels'])} | {one['opened']}"
        for number in numbers
        for one in [issues[number]]
    ]
    return "\n".join([found, *lines])


@server.tool()
def list_issues(
    context: Context, status: str = "", label: str = "", assignee: str = "", milestone: str = ""
) -> str:
    """List issues, oldest first."""
    issues = state_of(_database(context))
    wanted = {"status": status, "assignee": assignee, "milestone": milestone}
    chosen = [
        number
        for number, one in issues.items()
        if all(not value or one[field] == value for field, value in wanted.items())
        and (not label or label in one["labels"])
    ]
    return _lines(issues, sorted(chosen, key=lambda number: issues[number]["opened"]))


@server.tool()
def search_issues(context: Context, text: str) -> str:
    """Find issues whose title contains a text."""
    issues = state_of(_database(context))
    return _lines(issues, [n for n, one in issues.items() if text.lower() in one["title"].lower()])


@server.tool()
def get_issue(context: Context, number: int) -> str:
    """Show an issue with its comments."""
    issues = state_of(_issue(context, number))
    comments = issues[str(number)]["comments"]
    return "\n".join([_lines(issues, [str(number)]), f"{len(comments)} comments", *comments])


@server.tool()
def create_issue(context: Context, title: str, label: str = "") -> str:
    """Open a new issue."""
    if label:
        _known(label, LABELS, "label")
    database = _database(context)
    number = database.execute(
        "insert into issues values ((select max(number) + 1 from issues), ?, 'open', '', '', "
        "'2026-12-01', null) returning number",
        (title,),
    ).fetchone()[0]
    if label:
        database.execute("insert into labels values (?, ?)", (number, label))
    return f"created #{number}"


@server.tool()
def set_status(context: Context, number: int, status: str) -> str:
    """Close or reopen an issue: status is open or closed."""
    _known(status, ("open", "closed"), "status")
    _set(context, number, "status", status)
    return f"#{number} is {status}"


@server.tool()
def assign_issue(context: Context, number: int, user: str) -> str:
    """Assign an issue to a user; to nobody, if user is empty."""
    _set(context, number, "assignee", user and _known(user, PEOPLE, "user"))
    return f"#{number} is assigned to {user or 'nobody'}"


@server.tool()
def move_issue(context: Context, number: int, milestone: str) -> str:
    """Move an issue to a milestone."""
    _set(context, number, "milestone", _known(milestone, MILESTONES, "milestone"))
    return f"#{number} is in {milestone}"


@server.tool()
def rename_issue(context: Context, number: int, title: str) -> str:
    """Change the title of an issue."""
    _set(context, number, "title", title)
    return f"#{number} is called {title}"


@server.tool()
def merge_issue(context: Context, number: int, into: int) -> str:
    """Close an issue as the duplicate of another one."""
    _issue(context, into)
    _set(context, number, "duplicate_of", into)
    _set(context, number, "status", "closed")
    return f"#{number} is a duplicate of #{into}"


@server.tool()
def add_label(context: Context, number: int, label: str) -> str:
    """Give an issue a label."""
    row = (number, _known(label, LABELS, "label"))
    _issue(context, number).execute("insert or ignore into labels values (?, ?)", row)
    return f"#{number} has the label {label}"


@server.tool()
def remove_label(context: Context, number: int, label: str) -> str:
    """Take a label from an issue."""
    row = (number, label)
    _issue(context, number).execute("delete from labels where issue = ? and label = ?", row)
    return f"#{number} lacks the label {label}"


@server.tool()
def comment(context: Context, number: int, text: str) -> str:
    """Comment on an issue."""
    _issue(context, number).execute(
        "insert into comments (issue, author, body) values (?, 'agent', ?)", (number, text)
    )
    return f"commented on #{number}"


@server.tool()
def export(context: Context) -> str:
    """Return everything as JSON: for the scorer, hidden from the policy."""
    return json.dumps(state_of(_database(context)))


def _set(context: Context, number: int, field: str, value: object) -> None:
    database = _issue(context, number)
    database.execute(f"update issues set {field} = ? where number = ?", (value, number))


def main() -> None:
    """Serve one database over stdio, or those of all sessions over HTTP."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database", nargs="?", type=Path, help="of the only rollout")
    parser.add_argument("--worlds", type=Path, help="folder of the questions' databases")
    parser.add_argument("--port", type=int, default=8800)
    args = parser.parse_args()
    if args.worlds is None:
        _worlds["only"] = args.database
        server.run("stdio")
        return
    with tempfile.TemporaryDirectory(prefix="tracker-") as copies:
        _worlds.update(fixtures=args.worlds, copies=Path(copies))
        server.run("streamable-http", port=args.port, json_response=True, max_sessions=None)


if __name__ == "__main__":
    main()
