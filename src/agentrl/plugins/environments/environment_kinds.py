"""Kinds of environments: how the tasks of each package are listed and run.

Runs in the interpreter that has the package, so it uses only the standard library and nothing from
AgentRL. A kind is a class that satisfies `EnvironmentKind`, followed here by its own functions.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Protocol

MAX_TASKS = 1_000_000
_MAX_SHOWN = 3
_DEFAULT_SIZE = 500
_MAX_SHELL_CHARS, _MAX_COMMAND_BYTES = 8000, 100_000
_SHELL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command of the shell; files stay, the directory starts anew.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
_MAX_SEAT_CHARS = 100
_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""OpenEnv's own actions: listing tools and calling them."""
_CAPACITY_SECONDS, _MAX_CAPACITY_WAITS = 0.5, 1200


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Send keys and conversations to no other host: a redirect is an error."""


open_url = urllib.request.build_opener(_NoRedirects).open


class World(Protocol):
    """What an environment changes besides its conversation, as far as it can be saved and restored."""

    def snapshot(self) -> bytes | None:
        """Return its state while the model replies; None if it cannot be saved."""
        ...

    def restore(self, state: bytes) -> None:
        """Take it to a state that `snapshot` returned, perhaps on another machine."""
        ...


class ModelOfRollout(Protocol):
    """Calls the model of one rollout."""

    endpoint: dict[str, str]
    """`base_url`, `model` and `api_key` for a separate client."""

    def __call__(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the model's message; raises `RolloutLimitReached` at the rollout's limits."""
        ...

    def begin(self, messages: list[dict[str, Any]], world: World) -> list[dict[str, Any]]:
        """Return the conversation to begin with, and let rollouts branch by snapshots of `world`.

        If this rollout branches from another one and has a snapshot of it, `world` is restored and
        the conversation is the other one's at that turn; otherwise it is `messages`. Only for
        environments with one conversation, which each call repeats and extends.
        """
        ...


class RolloutLimitReached(Exception):
    """The model may not be called again in this rollout."""


class Mistake(Exception):
    """The user named something that does not exist, or gave an argument an invalid value."""


class EnvironmentKind(Protocol):
    """An environment; raises `Mistake` for a usage error when it loads."""

    size: int
    """The number of its tasks."""

    def __init__(self, name: str, args: dict[str, Any]) -> None: ...

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task: `query` and, if it has them, `system_prompt`, `answer`, `id` or `tags`."""
        ...

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task and return the fields of an `AgentResult`."""
        ...


class ReasoningGym:
    """`reasoning_gym:NAME?size=...&seed=...`: one question, one reply; scored by the dataset."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        _check_name(name, known)
        config = known[name][1]
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        _check_arguments(args, defaults | {"seed": 0})
        self.size = args.setdefault("size", _DEFAULT_SIZE)
        self._data = gym.create_dataset(name, **args)
        self._utils = importlib.import_module("reasoning_gym.utils")
        self._system_prompt = self._utils.SYSTEM_PROMPTS["default"]

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        entry = self._data[number]
        prompt = {"query": entry["question"], "system_prompt": self._system_prompt}
        return {**prompt, "answer": entry["answer"]}

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task."""
        entry = self._data[number]
        system = {"role": "system", "content": self._system_prompt}
        reply = chat([system, {"role": "user", "content": entry["question"]}])
        answer = self._utils.extract_answer(reply["content"] or "")
        return {"answer": answer, "reward": self._data.score_answer(answer, entry)}


class TextArena:
    """`textarena:NAME?size=...&seed=...`: a single-player game, whose messages have the role user."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._arena, self._name = importlib.import_module("textarena"), name
        _check_name(name, known := self._arena.envs.registration.ENV_REGISTRY)
        self.size, self._seed = _pop_int(args, "size", _DEFAULT_SIZE), _pop_int(args, "seed", 0)
        module, _, attribute = known[name].entry_point.partition(":")
        game_class = getattr(importlib.import_module(module), attribute)
        parameters = inspect.signature(game_class).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in parameters}
        _check_arguments(args, defaults, known[name].kwargs)
        self._args, self._lock = args, threading.Lock()
        try:
            self._new_game(0)
        except AssertionError as error:
            raise Mistake(f"{name} is not a single-player game ({error})") from None

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        return {"query": _game_text(self._new_game(number))}

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task."""
        game, done, move, messages = self._new_game(number), False, "", []
        while not done:
            messages.append({"role": "user", "content": _game_text(game)})
            messages.append(chat(messages))
            move = messages[-1]["content"] or ""
            done, _ = game.step(action=move)
        rewards, info = game.close()
        metrics = {"moves": info[0]["turn_count"], "invalid_move": info[0]["invalid_move"]}
        return {"answer": move, "reward": rewards[0], "metrics": metrics}

    def _new_game(self, number: int) -> Any:
        # Games draw from Python's global random generator, which all threads share.
        with self._lock:
            game = self._arena.make(env_id=self._name, **self._args)
            game.reset(num_players=1, seed=self._seed + number)
        return game


def _game_text(game: Any) -> str:
    """Return the game's messages since the last call; its wrappers repeat all earlier ones."""
    while hasattr(game, "env"):
        game = game.env
    _, messages = game.get_observation()
    return "\n".join(text for sender, text, _ in messages if sender < 0)


class Verifiers:
    """`verifiers:TASKSET?size=...`: a task set with its rubric; each of its rewards is a metric.

    If its environment has several agents, each one has a seat at the policy's endpoint and its own
    reward.
    """

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._vf = vf = importlib.import_module("verifiers.v1")
        size = _pop_int(args, "size", _DEFAULT_SIZE)
        # The default runtime is a service that requires a login.
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        taskset = {"taskset": {"id": name, **args}}
        names = _agents_of(vf, vf.resolve_env_config(taskset))
        config = vf.resolve_env_config(taskset | dict.fromkeys(names, agent))
        self._agents = _agents_of(vf, config)
        self._env = vf.load_environment(config)
        self._has_seats = not isinstance(self._env, vf.SingleAgentEnv)
        if self._has_seats:
            self._seat_agents()
        self._tasks = list(itertools.islice(self._env.taskset, size))
        self.size = len(self._tasks)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(self._env.serving().__aenter__())

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        data = self._tasks[number].data
        return {"query": _as_text(data.prompt), "answer": getattr(data, "answer", None)}

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task."""
        key_variable, endpoint = f"AGENTRL_KEY_{id(chat)}", chat.endpoint
        os.environ[key_variable] = endpoint["api_key"]  # concurrent rollouts have separate keys
        client = self._vf.EvalClientConfig(base_url=endpoint["base_url"], api_key_var=key_variable)
        context = self._vf.ModelContext(model=endpoint["model"], client=client)
        minted: list[Any] = []
        try:
            episode = self._run(
                self._env.run_episode(self._tasks[number], context, on_trace=minted.append)
            )
        finally:
            del os.environ[key_variable]
        if not episode.traces or not self._env.complete(episode):
            errors = [error for trace in episode.traces for error in trace.errors]
            errors += episode.errors
            return {"answer": None, "error": errors[-1].message if errors else "no agent ran"}
        if not self._has_seats:
            (trace,) = episode.traces
            metrics = _figures(trace)
            return {"answer": trace.last_reply, "reward": trace.reward, "metrics": metrics}
        return self._result_of_seats(episode.traces, minted)

    def _seat_agents(self) -> None:
        """Have each agent name its seat in the calls that it makes to the policy."""
        for name in self._agents:
            if len(name) > _MAX_SEAT_CHARS:
                raise Mistake(
                    f"the name of its agent {name[:20]}... has {len(name)} characters; the limit "
                    f"is {_MAX_SEAT_CHARS}"
                )
        own_setup = self._env.setup

        async def setup(agents: Any) -> None:
            for name in filter(self._is_policy, self._agents):
                agent = getattr(agents, name)
                headers = {"X-AgentRL-Seat": urllib.parse.quote(name, safe="")}
                client = agent.ctx.client.model_copy(update={"headers": headers})
                agent.ctx = dataclasses.replace(agent.ctx, client=client)
            await own_setup(agents)

        self._env.setup = setup

    def _is_policy(self, name: str) -> bool:
        """Return whether the policy plays an agent; else the environment pins another model."""
        return self._agents[name].client is None and self._agents[name].model is None

    def _result_of_seats(self, traces: list[Any], minted: list[Any]) -> dict[str, Any]:
        """Return the fields of a result."""
        order = list(self._agents)
        traces = sorted(traces, key=lambda trace: order.index(trace.agent.name))
        finished = {trace.id for trace in traces}
        trained = [
            t for t in traces if t.ok and t.agent.trainable and self._is_policy(t.agent.name)
        ]
        if not trained:
            return {"answer": None, "error": "no agent is left that the policy plays and trains"}
        trained_ids = {trace.id for trace in trained}
        seats = [
            {
                "name": trace.agent.name,
                "stint": trace.id,
                "reward": trace.reward if trace.id in trained_ids else None,
                "trained": trace.id in trained_ids,
            }
            for trace in (*traces, *(trace for trace in minted if trace.id not in finished))
        ]
        figures: dict[str, list[float]] = {}
        rewards: dict[str, list[float]] = {}
        for trace in traces:
            suffix = f"_{trace.agent.name}" if len(self._agents) > 1 else ""
            for key, value in _figures(trace).items():
                figures.setdefault(f"{key}{suffix}", []).append(value)
            if suffix and trace.rewards:
                rewards.setdefault(f"reward{suffix}", []).append(trace.reward)
        return {
            "answer": trained[0].last_reply,
            # As verifiers reports an episode: stints that are not trained do not count.
            "reward": sum(trace.reward for trace in trained) / len(trained),
            "metrics": {
                key: sum(values) / len(values) for key, values in (figures | rewards).items()
            },
            "seats": seats,
        }

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _agents_of(vf: Any, config: Any) -> dict[str, Any]:
    """Return the agents of an environment of verifiers, by name."""
    return {
        name: value for name, value in dict(config).items() if isinstance(value, vf.AgentConfig)
    }


def _figures(trace: Any) -> dict[str, float]:
    """Return the rewards and metrics of a trace of verifiers, by name."""
    figures = {key: reward.value for key, reward in trace.rewards.items() if reward is not None}
    return figures | {key: value for key, value in trace.metrics.items() if value is not None}


def _as_text(prompt: Any) -> str:
    """Return a prompt, which may be text or messages, as text."""
    if prompt is None or isinstance(prompt, str):
        return prompt or "(the environment begins)"
    return "\n".join(str(getattr(message, "content", message)) for message in prompt)


class OpenEnv:
    """`openenv:URL?size=...&seed=...`: a server's episodes, with a reward for each action.

    Actions are JSON; for a server with tools, they are tool calls.
    """

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        self._url = name.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise Mistake("expected an address, such as openenv:http://127.0.0.1:8000")
        self.size, self._seed = _pop_int(args, "size", _DEFAULT_SIZE), _pop_int(args, "seed", 0)
        _check_arguments(args, {"size": 0, "seed": 0})
        self._schema = _schema_of_actions(self._url)
        is_tool_call = self._schema.get("title") in _TOOL_ACTIONS
        self._act = self._call_tools if is_tool_call else self._write_actions

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        return {"query": f"episode {self._seed + number} at {self._url}"}

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task."""
        rewards: list[float | None] = []
        answer: str | None = None
        env, state = self._new_episode(number)
        with contextlib.closing(env), contextlib.suppress(RolloutLimitReached):
            answer = self._act(env, state, chat, rewards)
        metrics = {"return": sum(reward or 0.0 for reward in rewards), "actions": len(rewards)}
        *steps, last = rewards or [None]
        if last is None and any(reward is not None for reward in steps):
            last = 0.0  # only earlier actions were rewarded
        return {"answer": answer, "reward": last, "step_rewards": steps, "metrics": metrics}

    def _write_actions(
        self, env: Any, state: Any, chat: ModelOfRollout, rewards: list[float | None]
    ) -> str:
        """Run a model whose replies are actions; return the last reply."""
        instructions = f"Reply with an action, as JSON of this schema: {json.dumps(self._schema)}"
        messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}]
        observation = state.observation
        while not state.done:
            messages.append({"role": "user", "content": json.dumps(observation)})
            messages.append(chat(messages))
            try:
                state = env.step(_as_action(messages[-1]["content"] or "", self._schema))
                observation = state.observation
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                state.reward, observation = 0.0, {"error": "that is no action of the schema"}
            rewards.append(state.reward)
        return messages[-1]["content"] or ""

    def _call_tools(
        self, env: Any, state: Any, chat: ModelOfRollout, rewards: list[float | None]
    ) -> str:
        """Run a model that calls tools; return its answer, or the call that ended the task."""
        specs = env.step({"type": "list_tools"}).observation["tools"]
        tools = [{"type": "function", "function": _as_function(spec)} for spec in specs]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": json.dumps(state.observation)}
        ]
        while True:
            messages.append(chat(messages, tools=tools))
            rewards.append(None)
            if not messages[-1].get("tool_calls"):
                return messages[-1]["content"] or ""
            for call in messages[-1]["tool_calls"]:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                action = {"tool_name": name, "arguments": json.loads(arguments)}
                state = env.step({"type": "call_tool", **action})
                if state.reward is not None:
                    rewards[-1] = (rewards[-1] or 0.0) + state.reward
                if state.done:
                    return f"{name}({arguments})"
                reply = {"role": "tool", "tool_call_id": call["id"]}
                messages.append({**reply, "content": _tool_result_text(state.observation)})

    def _new_episode(self, number: int) -> tuple[Any, Any]:
        """Open a session and start its episode; wait while the server has no free session."""
        for _ in range(_MAX_CAPACITY_WAITS):
            env = self._client(base_url=self._url).sync().connect()
            try:
                return env, env.reset(seed=self._seed + number)
            except Exception as error:
                env.close()
                # A full server sends an error and closes the connection; the client may see the
                # close first.
                closed = type(error).__name__ == "ConnectionClosedOK"
                if not closed and "CAPACITY_REACHED" not in str(error):
                    raise
            time.sleep(_CAPACITY_SECONDS)
        raise TimeoutError(f"{self._url} had no free session")


def _schema_of_actions(url: str) -> dict[str, Any]:
    try:
        with open_url(f"{url}/schema", timeout=10) as reply:
            schema: dict[str, Any] = json.load(reply)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"no OpenEnv server responds at this address ({error})") from None
    return schema


def _as_function(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenEnv tool in OpenAI's form."""
    function = {"name": spec["name"], "description": spec["description"]}
    return {**function, "parameters": spec["input_schema"]}


def _tool_result_text(observation: Mapping[str, Any]) -> str:
    """Return the text of a tool's result, or of its error."""
    if observation.get("error"):
        return f"error: {observation['error']['message']}"
    content = (observation.get("result") or {}).get("content") or ()
    texts = [part["text"] for part in content if part.get("type") == "text"]
    return "\n".join(texts) or json.dumps(observation.get("result"))


def _as_action(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a reply as an action; an action with a single field may be given as its bare value."""
    text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        action = json.loads(text)
    except (ValueError, RecursionError):
        action = text.strip()
    if isinstance(action, dict):
        return action
    required = schema.get("required", ())
    return {required[0] if len(required) == 1 else "": action}


class Harbor:
    """`harbor:FOLDER?runtime=docker`: tasks in Harbor's format.

    The policy has a shell; tests compute the reward.
    """

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._args = {"runtime": "docker", "skip_build": False}
        _check_arguments(args, self._args)
        self._args |= args
        load = importlib.import_module("agentrl.plugins.environments.harbor_tasks").load_tasks
        try:
            self._tasks = load(name, **self._args)
        except ValueError as error:
            raise Mistake(str(error)) from None
        self.size, self._root = len(self._tasks), os.path.abspath(name)

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        task = self._tasks[number]
        place = os.path.relpath(task.folder, os.path.dirname(self._root))
        return {"id": place, "query": task.instruction, "tags": task.tags}

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task."""
        task, answer, truncated = self._tasks[number], None, False
        deadline = time.monotonic() + task.agent_seconds
        with task.open(self._args["runtime"]) as sandbox:
            instruction = {"role": "user", "content": task.instruction}
            messages = chat.begin([instruction], sandbox)
            with contextlib.suppress(RolloutLimitReached):
                while answer is None and not truncated:
                    messages.append(chat(messages, tools=[_SHELL]))
                    calls = messages[-1].get("tool_calls") or ()
                    for call in calls:
                        output = run_call(sandbox, call, deadline - time.monotonic())
                        result = {"role": "tool", "tool_call_id": call["id"], "content": output}
                        messages.append(result)
                    answer = None if calls else messages[-1]["content"] or ""
                    truncated = time.monotonic() > deadline
            reward, metrics = task.reward(sandbox)
        metrics |= {"commands": sum(message["role"] == "tool" for message in messages)}
        return {"answer": answer, "reward": reward, "metrics": metrics, "truncated": truncated}


def run_call(sandbox: Any, call: Mapping[str, Any], seconds: float) -> str:
    """Run the command of a tool call; return the output shown to the policy."""
    try:
        command = str(json.loads(call["function"]["arguments"])["command"])
        num_bytes = len(command.encode())
    except (ValueError, KeyError, TypeError, RecursionError):
        return 'wrong call; the arguments are {"command": "..."}'
    if num_bytes > _MAX_COMMAND_BYTES or "\0" in command:
        return (
            f"no such command can be run: at most {_MAX_COMMAND_BYTES:,} bytes, and none of them 0"
        )
    status, output = sandbox.shell(command, max(1.0, seconds))
    if len(output) > _MAX_SHELL_CHARS:
        output = f"{output[: _MAX_SHELL_CHARS // 2]}\n...\n{output[-_MAX_SHELL_CHARS // 2 :]}"
    return output if status == 0 else f"{output}\n(exit status {status})"


class Bfcl:
    """`bfcl:CATEGORY,CATEGORY?split=train`: questions of the Berkeley Function Calling Leaderboard."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        _check_arguments(args, {"split": "train", "size": 0})
        split = args.get("split", "")
        if split not in ("", "train", "eval"):
            raise Mistake(f"split={split}: expected train or eval")
        try:
            self._board = importlib.import_module("bfcl_questions").Leaderboard(name, split)
        except ValueError as error:
            raise Mistake(str(error)) from None
        questions = self._board.questions
        if "size" in args:
            questions = sorted(questions, key=lambda question: question.share)[: args["size"]]
        self._questions, self.size = questions, len(questions)

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        question = self._questions[number]
        described = {"id": question.id, "query": question.text, "tags": [question.category]}
        return described | {"answer": question.truth and json.dumps(question.truth)}

    def play(self, number: int, chat: ModelOfRollout) -> dict[str, Any]:
        """Run a task."""
        messages, is_right = self._board.play(self._questions[number], chat)
        calls = [call["function"] for call in messages[-1].get("tool_calls") or ()]
        answer = json.dumps(calls) if calls else messages[-1]["content"] or None
        return {"answer": answer, "reward": float(is_right)}


KINDS: dict[str, type[EnvironmentKind]] = {
    "reasoning_gym": ReasoningGym,
    "textarena": TextArena,
    "verifiers": Verifiers,
    "openenv": OpenEnv,
    "harbor": Harbor,
    "bfcl": Bfcl,
}


def _check_name(name: str, known: Collection[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=_MAX_SHOWN) or sorted(known)[:_MAX_SHOWN]
        raise Mistake(
            f"unknown name {name!r}; did you mean {' or '.join(near)} ({len(known)} names are known)?"
        )


def _pop_int(args: dict[str, Any], name: str, default: int) -> int:
    """Remove an integer from the arguments and return it."""
    value = args.pop(name, default)
    _check_arguments({name: value}, {name: default})
    return int(value)


def _check_arguments(args: Mapping[str, Any], *known: Mapping[str, Any]) -> None:
    """Refuse arguments that are unknown, or of another type than their defaults."""
    defaults = {name: value for values in known for name, value in values.items()}
    for name, value in args.items():
        if name not in defaults:
            near = get_close_matches(name, defaults, n=_MAX_SHOWN) or sorted(defaults)
            raise Mistake(f"unknown parameter {name!r}; did you mean {', '.join(near)}?")
        default = defaults[name]
        same_type = isinstance(value, type(default)) and isinstance(value, bool) == (
            isinstance(default, bool)
        )
        if isinstance(default, bool | int | float | str) and not (
            same_type or (isinstance(default, float) and isinstance(value, int))
        ):
            raise Mistake(f"{name}={value}: expected a value such as {default}")
    if not 1 <= args.get("size", 1) <= MAX_TASKS:
        raise Mistake(f"size={args['size']}: expected a number from 1 to {MAX_TASKS:,}")
