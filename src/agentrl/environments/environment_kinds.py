"""The kinds of environments: how each package's tasks are listed and played.

Runs in the interpreter that has the package, so it knows Python's own library and nothing of AgentRL.
A kind is a class whose

    __init__(name, args)   loads the environment, or raises `Mistake` for what the user got wrong;
    size                   is the number of its tasks;
    row(number)            describes one: `query`, and `answer` or `tags` where it has them;
    play(number, chat)     plays it and returns the fields of an `AgentResult`.

`chat(messages, **fields)` asks the model and returns its message.
"""

import dataclasses
import importlib
import inspect
import threading
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

Chat = Callable[..., dict[str, Any]]
_MAX_SHOWN = 3
_DEFAULT_SIZE = 500


class Mistake(Exception):
    """The user named something that does not exist, or gave it a value that it cannot have."""


class ReasoningGym:
    """`reasoning_gym:NAME?size=...&seed=...`: one question, one reply; scored by the data set."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        _check_name(name, known)
        config = known[name][1]
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        _check_arguments(args, defaults | {"seed": 0})
        self.size = args.setdefault("size", _DEFAULT_SIZE)
        self._data = gym.create_dataset(name, **args)
        self._words = importlib.import_module("reasoning_gym.utils")

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        entry = self._data[number]
        return {"query": entry["question"], "answer": entry["answer"]}

    def play(self, number: int, chat: Chat) -> dict[str, Any]:
        """Play a task."""
        entry = self._data[number]
        system = {"role": "system", "content": self._words.SYSTEM_PROMPTS["default"]}
        reply = chat([system, {"role": "user", "content": entry["question"]}])
        answer = self._words.extract_answer(reply["content"] or "")
        return {"answer": answer, "reward": self._data.score_answer(answer, entry)}


class TextArena:
    """`textarena:NAME?size=...&seed=...`: a game for one player, whose messages are the user's."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._arena, self._name = importlib.import_module("textarena"), name
        _check_name(name, known := self._arena.envs.registration.ENV_REGISTRY)
        self.size, self._seed = _taken(args, "size", _DEFAULT_SIZE), _taken(args, "seed", 0)
        module, _, attribute = known[name].entry_point.partition(":")
        game = getattr(importlib.import_module(module), attribute)
        _check_arguments(args, _defaults(game), known[name].kwargs)
        self._args, self._lock = args, threading.Lock()
        try:
            self._begun(0)
        except AssertionError as error:
            raise Mistake(f"{name} is no game for one player ({error})") from None

    def row(self, number: int) -> dict[str, Any]:
        """Describe a task."""
        return {"query": _said_by_game(self._begun(number))}

    def play(self, number: int, chat: Chat) -> dict[str, Any]:
        """Play a task."""
        game, done, move, messages = self._begun(number), False, "", []
        while not done:
            messages.append({"role": "user", "content": _said_by_game(game)})
            messages.append(chat(messages))
            move = messages[-1]["content"] or ""
            done, _ = game.step(action=move)
        rewards, facts = game.close()
        metrics = {"moves": facts[0]["turn_count"], "invalid_move": facts[0]["invalid_move"]}
        return {"answer": move, "reward": rewards[0], "metrics": metrics}

    def _begun(self, number: int) -> Any:
        # Games draw from Python's own generator, which all threads share, once it is seeded.
        with self._lock:
            game = self._arena.make(env_id=self._name, **self._args)
            game.reset(num_players=1, seed=self._seed + number)
        return game


KINDS: dict[str, type[Any]] = {"reasoning_gym": ReasoningGym, "textarena": TextArena}


def _said_by_game(game: Any) -> str:
    """Return what a game said since it was last asked; its wrappers repeat all that was said."""
    while hasattr(game, "env"):
        game = game.env
    _, messages = game.get_observation()
    return "\n".join(text for sender, text, _ in messages if sender < 0)


def _check_name(name: str, known: Collection[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=_MAX_SHOWN) or sorted(known)[:_MAX_SHOWN]
        raise Mistake(f"there is no {name!r} among its {len(known)}; {' or '.join(near)}?")


def _taken(args: dict[str, Any], name: str, default: int) -> int:
    """Take a whole number out of the arguments."""
    value = args.pop(name, default)
    _check_arguments({name: value}, {name: default})
    return int(value)


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


def _check_arguments(args: Mapping[str, Any], *known: Mapping[str, Any]) -> None:
    """Refuse arguments that are unknown, or of another kind than their defaults."""
    defaults = {name: value for some in known for name, value in some.items()}
    for name, value in args.items():
        if name not in defaults:
            near = get_close_matches(name, defaults, n=_MAX_SHOWN) or sorted(defaults)
            raise Mistake(f"it has no parameter {name!r}; {', '.join(near)}?")
        default = defaults[name]
        fits = isinstance(value, type(default)) and isinstance(value, bool) == (
            isinstance(default, bool)
        )
        if isinstance(default, bool | int | float | str) and not (
            fits or (isinstance(default, float) and isinstance(value, int))
        ):
            raise Mistake(f"{name}={value}: expected a value such as {default}")
    if args.get("size", 1) < 1:
        raise Mistake(f"size={args['size']}: expected a number from 1")
