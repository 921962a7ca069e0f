"""Demonstrations of the Function Calling Leaderboard: its references, played in the environment.

`agentrl sft --train_file examples/bfcl/demonstrations.py` trains on `demonstrations()`; the
environment's interpreter is .agentrl/environments/bfcl (docs/environments.md).
"""

import ast
import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.schema import AgentEndpoint

QUESTIONS = "bfcl:live_simple,live_multiple?split=train"
NUM_QUESTIONS = 384
MAX_CHARS = 3000
"""Longer conversations, which take most of the time on few cores, are no demonstrations."""
MAX_STEPS = 20
"""More calls of a turn than the package allows one after another are made at once."""
JAVA_TYPE = re.compile(r"(?:This is Java(?:Script)?|elements are of) (?:type )?(\w+)")

Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]
Policy = Callable[[list[Message], list[dict[str, Any]]], Message]


class Oracle:
    """Answers a question with its reference, call by call.

    Args:
        row: the question, as `EnvironmentProcess.rows` describes it.

    Attributes:
        messages: the conversation, up to the last reply.
        tools: the tools of the last call.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []
        self._truth = None if row["answer"] is None else json.loads(row["answer"])
        self._category = str(row["tags"][0])
        self._replies = self._reply()

    def __call__(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Return the next reply."""
        self.tools = tools
        reply = next(self._replies)
        self.messages = [*messages, reply]
        return reply

    def _reply(self) -> Iterator[Message]:
        if self._truth is None:
            # No call is right where none of the tools is relevant, any call where one is.
            calls: list[Call] = []
            if "_relevance" in self._category:
                calls.append((self._functions[0]["name"], {}))
            yield _message(calls, "None of the functions can be used.")
        elif "multi_turn" in self._category:
            for turn in self._truth:
                calls = [self._parsed(text) for text in turn]
                steps = [[call] for call in calls] if len(calls) <= MAX_STEPS else [calls]
                yield from (_message(step) for step in steps)
                yield _message([], "Done.")
        else:
            yield _message([self._call(*item) for call in self._truth for item in call.items()])

    @property
    def _functions(self) -> list[dict[str, Any]]:
        return [tool["function"] for tool in self.tools]

    def _schema(self, name: str) -> dict[str, Any]:
        """Return the parameters of a function."""
        shown = [one["parameters"] for one in self._functions if one["name"] == name]
        return shown[0] if shown else {"properties": {}}  # a function that comes in a later turn

    def _parsed(self, text: str) -> Call:
        """Return a call that is written as Python."""
        call: Any = ast.parse(text, mode="eval").body
        name = ast.unparse(call.func)
        names = self._schema(name)["properties"]
        arguments = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
        return name, arguments | {one.arg: ast.literal_eval(one.value) for one in call.keywords}

    def _call(self, dotted: str, choices: Mapping[str, Sequence[Any]]) -> Call:
        """Return a call with one of several right values each, without what may be left out."""
        name = dotted.replace(".", "_")
        schema = self._schema(name)
        arguments = {}
        for key, values in choices.items():
            if key in schema["required"] or "" not in values:
                value = _first(values)
                shown = schema["properties"].get(key, {}).get("description", "")
                arguments[key] = _written(value, JAVA_TYPE.findall(shown), self._category)
        return name, arguments


def _message(calls: Sequence[Call], text: str = "") -> Message:
    """Return a reply that makes calls, or says a text."""
    if not calls:
        return {"role": "assistant", "content": text}
    tool_calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _first(values: Sequence[Any]) -> Any:
    """Return the first of several right values; "" says that there may be none."""
    value = next((value for value in values if value != ""), "")
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return [_members(one) for one in value]
    return _members(value) if isinstance(value, dict) else value


def _members(choices: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return a right object, whose members have several right values each."""
    return {key: values[0] for key, values in choices.items() if "" not in values}


def _written(value: Any, types: Sequence[str], category: str) -> Any:
    """Return a value as its category has it: JSON, or text of Java or JavaScript."""
    if category == "simple_java":
        return _java(value, *types)
    if category == "simple_javascript" and not isinstance(value, str):
        return f"{value}n" if "Bigint" in types else json.dumps(value)
    return value


def _java(value: Any, kind: str = "any", inner: str = "any") -> str:
    """Return a value of a type, whose elements have another one, in Java."""
    if isinstance(value, dict):
        puts = " ".join(f'put("{key}", {json.dumps(one)});' for key, one in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    if isinstance(value, list):
        is_list = kind == "ArrayList"
        quote = '"' if is_list and inner == "String" else ""
        items = ", ".join(f"{quote}{_java(one, inner)}{quote}" for one in value)
        return (
            f"new ArrayList<>(Arrays.asList({items}))" if is_list else f"new {inner}[]{{{items}}}"
        )
    suffix = {"float": "f", "long": "L"}.get(kind, "")
    return value if isinstance(value, str) else f"{json.dumps(value)}{suffix}"


@contextmanager
def serving(policies: Sequence[Policy]) -> Iterator[str]:
    """Serve the policy of each number below `ADDRESS/NUMBER/v1`; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            policy = policies[int(self.path.split("/")[1])]
            reply = policy(asked["messages"], asked["tools"])
            body = json.dumps({"choices": [{"message": reply}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing of each call."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def environment(env: str, python: Path | None = None) -> EnvironmentProcess:
    """Start an environment: as for `--env`, and its interpreter, as for `--env_python`."""
    return EnvironmentProcess(EnvironmentUri.parse(env), DataSection(env_python=python))


def scores(process: EnvironmentProcess, asked: Sequence[tuple[int, Policy]]) -> list[float]:
    """Return the scores of policies, each of which answers the question of a number."""

    async def play(address: str) -> list[float]:
        found = []
        for index, (number, _) in enumerate(asked):
            endpoint = AgentEndpoint(f"{address}/{index}/v1", "oracle", "none")
            result = await process.play(number, endpoint)
            found.append(float(result.reward or 0.0))
        return found

    # In a thread, because the caller may be in an event loop.
    with (
        serving([policy for _, policy in asked]) as address,
        ThreadPoolExecutor(1) as thread,
    ):
        return thread.submit(asyncio.run, play(address)).result()


def played(
    env: str, python: Path | None = None, policy: type[Oracle] = Oracle
) -> Iterator[tuple[str, float, Oracle]]:
    """Play an environment's questions.

    Args:
        env: as for `--env`.
        python: its interpreter, as for `--env_python`.
        policy: what answers a question.

    Yields:
        A question's id, the score, and what answered it.
    """
    with environment(env, python) as process:
        rows = process.rows(range(process.size()))
        policies = [policy(row) for row in rows]
        found = scores(process, list(enumerate(policies)))
    for row, score, answered in zip(rows, found, policies, strict=True):
        yield row["id"], score, answered


def demonstrations(env: str = QUESTIONS, num: int = NUM_QUESTIONS) -> Iterator[dict[str, Any]]:
    """Yield conversations of the references that the checker accepts, without long ones.

    Args:
        env: as for `--env`.
        num: the number of questions, which are of all its categories.
    """
    mark = "&" if "?" in env else "?"
    for _, score, oracle in played(f"{env}{mark}size={num}"):
        talk = {"messages": oracle.messages, "tools": oracle.tools}
        if score == 1.0 and len(json.dumps(talk)) <= MAX_CHARS:
            yield talk
