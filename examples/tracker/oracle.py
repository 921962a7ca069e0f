"""The right calls of each question, and demonstrations of them from the real server.

python oracle.py --num 96        # data/demonstrations.jsonl, for `agentrl sft`
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

HERE = Path(__file__).resolve().parent
SETTERS = {
    "status": ("set_status", "status"),
    "assignee": ("assign_issue", "user"),
    "milestone": ("move_issue", "milestone"),
    "title": ("rename_issue", "title"),
}
Call = tuple[str, dict[str, Any]]


def right_calls(row: dict[str, Any]) -> list[Call]:
    """Return the calls that answer a question: look, then act from the oldest issue on."""
    before, after = row["before"], row["after"]
    calls = [] if row["look"] is None else [(row["look"][0], row["look"][1])]
    for number in sorted(after, key=lambda number: after[number]["opened"]):
        if number not in before:
            new = after[number]
            calls.append(("create_issue", {"title": new["title"], "label": new["labels"][0]}))
        elif before[number] != after[number]:
            calls += _acts(int(number), before[number], after[number])
    return calls


def _acts(number: int, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Call]:
    """Yield the calls that make an issue what it should be."""
    if new["duplicate_of"] != old["duplicate_of"]:
        yield "merge_issue", {"number": number, "into": new["duplicate_of"]}
        return
    for field, (tool, argument) in SETTERS.items():
        if new[field] != old[field]:
            yield tool, {"number": number, argument: new[field]}
    for label in new["labels"]:
        if label not in old["labels"]:
            yield "add_label", {"number": number, "label": label}
    for label in old["labels"]:
        if label not in new["labels"]:
            yield "remove_label", {"number": number, "label": label}
    for comment in new["comments"][len(old["comments"]) :]:
        yield "comment", {"number": number, "text": comment.removeprefix("agent: ")}


def right_answer(row: dict[str, Any]) -> str:
    """Return the answer of a question."""
    return row["answer"] or "done"


async def demonstration(url: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the conversation of the right calls, with the server's own results."""
    server = {"url": url, "headers": {"X-AgentRL-Question": row["id"]}, "per_rollout": True}
    config = ToolsConfig(servers=load_mcp_servers({"tracker": server}), blocked_tools=("export",))
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["query"]}]
    async with connect_tools(config) as box, box.for_rollout() as tools:
        for index, (tool, arguments) in enumerate(right_calls(row)):
            result = await tools.call(tool, arguments)
            assert not result.is_error, result.content
            function = {"name": tool, "arguments": arguments}
            call = {"id": f"call_{index}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{index}", "content": result.content},
            ]
        messages.append({"role": "assistant", "content": f"<answer>{right_answer(row)}</answer>"})
        return {"messages": messages, "tools": [spec.openai() for spec in tools.specs]}


@contextmanager
def serving(worlds: Path) -> Iterator[str]:
    """Run the tracker for all questions; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [HERE / "tracker.py", "--worlds", worlds, "--port", port]
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


async def write_demonstrations(folder: Path, num: int) -> None:
    """Write demonstrations of the first training questions."""
    lines = (folder / "train.jsonl").read_text().splitlines()[:num]
    with serving(folder / "worlds") as url, (folder / "demonstrations.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps(await demonstration(url, json.loads(line))) + "\n")


def main() -> None:
    """Write demonstrations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=96)
    parser.add_argument("--folder", type=Path, default=HERE / "data")
    args = parser.parse_args()
    asyncio.run(write_demonstrations(args.folder, args.num))
    print(f"{args.num} demonstrations in {args.folder / 'demonstrations.jsonl'}")


if __name__ == "__main__":
    main()
