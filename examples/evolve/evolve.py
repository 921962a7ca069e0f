"""Makes tasks by playing a server's tools, trains, evaluates, makes harder ones: ROUNDS [FLAGS]."""

import asyncio
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # wherever the command was started
from agentrl.tools import McpServer, ToolBox, ToolsConfig, connect_tools
from examples.shop.questions import ITEMS, KINDS

WRITER, ARGS = os.environ.get("WRITER"), ("examples/shop/server.py", "--stdio")
SHOP = McpServer(transport="stdio", command=sys.executable, args=ARGS)
WORDS = {f"{kind.lookup} {kind.operation}": kind.phrasings for kind in KINDS}
Task = dict[str, Any]


async def worded(tag: str, item: str, n: int, draw: random.Random) -> str:
    """Return a question: by the model WRITER, or in the words that the demo's model knows."""
    if WRITER is None:
        return draw.choice(WORDS[tag]).format(item=item, n=n)
    ask = f"Write the question whose answer is {tag.replace(' ', f' of {item}, then ')} with {n}."
    messages: Any = [{"role": "user", "content": ask}]
    reply = await AsyncOpenAI().chat.completions.create(model=WRITER, messages=messages)
    return reply.choices[0].message.content or ""


async def played(tools: ToolBox, tag: str, draw: random.Random) -> Task | None:
    """Return the task of two calls with drawn arguments; None if a check of it fails."""
    (first, then), item, n, results = tag.split(), draw.choice(ITEMS), draw.randint(2, 9), []
    for _ in range(2):  # tools that answer the same call differently make no task
        found = await tools.call(first, {"item": item})
        results.append(await tools.call(then, {"a": int(found.content), "b": n}))
    query, answer = await worded(tag, item, n, draw), results[0].content
    is_sound = not results[0].is_error and results[1].content == answer
    if not is_sound or item not in query or str(n) not in query:
        return None
    held_out = zlib.crc32(f"{tag} {item}".encode()) % 5 == 0  # the same ones in every round
    return {"query": query, "answer": answer, "tag": tag, "held_out": held_out}


def checked(tasks: list[Task]) -> list[Task]:
    """Return every question once, without those that have two answers."""
    unique = {(task["query"].lower(), task["answer"]): task for task in tasks}
    asked = [query for query, _ in unique]
    return [task for (query, _), task in unique.items() if asked.count(query) == 1]


async def made(draw: random.Random, weights: dict[str, float]) -> list[Task]:
    """Return the tasks of 300 plays that pass every check."""
    async with connect_tools(ToolsConfig(servers={"shop": SHOP})) as tools:
        takes = {spec.name: set(spec.parameters["properties"]) for spec in tools.specs}
        tags = [f"{f} {g}" for f in takes for g in takes if takes[f] == {"item"} != takes[g]]
        tags = draw.choices(tags, [weights.get(tag, 1.0) for tag in tags], k=300)
        return checked([task for tag in tags if (task := await played(tools, tag, draw))])


if __name__ == "__main__":
    weights, model = dict[str, float](), "assets/demo/model"
    flags = ["--config=assets/demo/grpo.yaml", *(sys.argv[2:] or ["--max_steps=10"])]
    for n in range(int(sys.argv[1])):
        tasks, folder = asyncio.run(made(random.Random(n), weights)), Path(f"output/evolve_{n}")
        folder.mkdir(parents=True, exist_ok=True)
        run = f"-m agentrl run --run_name {folder.name} --model_name_or_path {model}"
        for split in ("train", "eval"):
            rows = [json.dumps(task) for task in tasks if task["held_out"] == (split == "eval")]
            (folder / f"{split}.jsonl").write_text("\n".join(rows))
            run += f" --{split}_file {folder}/{split}.jsonl"
        subprocess.run([sys.executable, *run.split(), *flags], check=True)
        summary = json.loads((folder / "summary.json").read_text())
        weights = {tag: 1.1 - s["mean"] for tag, s in summary["evals"][-1]["by_tag"].items()}
        print(json.dumps({"tasks": len(tasks), **summary["eval_reward"], "weights": weights}))
        model = str(max((folder / "checkpoints").iterdir()) / "model")
