"""The Berkeley Function Calling Leaderboard v4, played and scored by the package `bfcl-eval`.

Runs in the interpreter that has the package, so it uses only the standard library besides, and
nothing from AgentRL. Questions, tool schemas, simulated APIs and checkers are the package's own.
"""

import hashlib
import importlib
import inspect
import json
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

Message = dict[str, Any]
Chat = Callable[..., Message]

_POLICY = "agentrl"
"""Name of the model in the package's table."""
_HELD_OUT = 0.2
"""Share of the questions in the split `eval`."""
_MAX_DIGITS = 10_000
_DIGITS = ("exponent", "precision", "decimal_places")
"""Arguments of the simulated calculator which say how large a result is: without a bound, one call
takes hours and the process with it."""


@dataclass(frozen=True)
class LeaderboardQuestion:
    """One question.

    Attributes:
        category: its category.
        shown: the package's entry, with tools as the model sees them.
        checked: the same entry, with tools as the checker reads them.
        truth: the reference; None if any call, or no call, is right.
    """

    category: str
    shown: Mapping[str, Any]
    checked: Mapping[str, Any]
    truth: list[Any] | None

    @property
    def id(self) -> str:
        """The package's id."""
        return str(self.shown["id"])

    @property
    def text(self) -> str:
        """What users say in it."""
        return "\n".join(message["content"] for turn in self.shown["question"] for message in turn)

    @property
    def share(self) -> float:
        """A number from 0 to 1 that is the same for the same question in another category."""
        number = self.id.rpartition("_")[2]
        same = number if "multi_turn" in self.category else " ".join(self.text.lower().split())
        return int.from_bytes(hashlib.blake2b(same.encode(), digest_size=4).digest()) / 2**32


class Leaderboard:
    """Questions of some categories.

    Args:
        names: categories or groups of the package, separated by commas.
        split: "train", "eval", or "" for both.

    Raises:
        ValueError: a category is unknown, or cannot be played.
    """

    def __init__(self, names: str, split: str) -> None:
        self._lock = threading.Lock()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BFCL_PROJECT_ROOT"] = folder  # it makes folders for results when imported
            self._load_package()
            chosen = dict.fromkeys(self._categories(names))
            questions = [q for name in chosen for q in self._questions_of(name)]
        self.questions = [
            q for q in questions if not split or (q.share < _HELD_OUT) == (split == "eval")
        ]

    def play(self, question: LeaderboardQuestion, chat: Chat) -> tuple[list[Message], bool]:
        """Return the conversation about a question, and whether the checker accepts it."""
        if "multi_turn" in question.category:
            return self._play_turns(question, chat)
        messages = list(question.shown["question"][0])
        messages.append(chat(messages, tools=self.tools_of(question.shown["function"])))
        return messages, self._accepts(question, _calls_of(messages[-1]))

    def tools_of(self, functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return functions in OpenAI's form."""
        style = self._enums.ModelStyle.OPENAI_COMPLETIONS
        tools: list[dict[str, Any]] = self._handler.convert_to_tool(
            functions, self._types.GORILLA_TO_OPENAPI, style
        )
        return tools

    def _load_package(self) -> None:
        importlib.import_module("bfcl_eval")
        # Of its table of models, the checker reads whether their calls have "_" for "." in names.
        # The table itself imports the clients of all vendors.
        table: Any = ModuleType("bfcl_eval.constants.model_config")
        table.MODEL_CONFIG_MAPPING = {_POLICY: SimpleNamespace(underscore_to_dot=True)}
        sys.modules[table.__name__] = table
        load = importlib.import_module
        self._utils, self._handler = load("bfcl_eval.utils"), load("bfcl_eval.model_handler.utils")
        self._names = load("bfcl_eval.constants.category_mapping")
        self._enums = load("bfcl_eval.constants.enums")
        self._types = load("bfcl_eval.constants.type_mappings")
        self._prompts = load("bfcl_eval.constants.default_prompts")
        self._check_calls = load("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
        turns = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_"
        self._check_turns = load(f"{turns}checker").multi_turn_checker
        self._world = load(f"{turns}utils")

    def _categories(self, names: str) -> Iterator[str]:
        playable = self._names.SINGLE_TURN_CATEGORY + self._names.MULTI_TURN_CATEGORY
        for given in names.split(","):
            for name in self._names.TEST_COLLECTION_MAPPING.get(given, [given]):
                if name not in playable:
                    why = "not supported" if name in self._names.ALL_CATEGORIES else "unknown"
                    raise ValueError(f"{name!r} is {why}; give one of {', '.join(playable)}")
                yield name

    def _questions_of(self, category: str) -> list[LeaderboardQuestion]:
        load = self._utils.load_dataset_entry
        shown, checked = load(category), load(category, include_language_specific_hint=False)
        truths: list[Any] = [None] * len(shown)
        if not self._utils.is_relevance_or_irrelevance(category):
            entries = self._utils.load_ground_truth_entry(category)
            truths = [entry["ground_truth"] for entry in entries]
        return [
            LeaderboardQuestion(category, *parts)
            for parts in zip(shown, checked, truths, strict=True)
        ]

    def _accepts(self, question: LeaderboardQuestion, calls: list[dict[str, Any]]) -> bool:
        if question.truth is None:
            is_call = not self._utils.is_empty_output(calls)
            return is_call != ("irrelevance" in question.category)
        language = question.category.removeprefix("simple_").upper()
        languages = self._enums.Language
        checked = self._check_calls(
            question.checked["function"],
            calls,
            question.truth,
            getattr(languages, language, languages.PYTHON),
            question.category,
            _POLICY,
        )
        return bool(checked["valid"])

    def _play_turns(self, question: LeaderboardQuestion, chat: Chat) -> tuple[list[Message], bool]:
        """Play a question of several turns: the user goes on when the model answers in words."""
        owner = f"{_POLICY}{uuid.uuid4().hex}"  # the package keeps its worlds by name
        entry, messages = question.shown, []
        functions, done = list(entry["function"]), []
        try:
            for number, turn in enumerate(entry["question"]):
                late = entry.get("missed_function", {}).get(str(number), ())
                if late:
                    functions += late
                    told = self._prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
                    turn = [{"role": "user", "content": told}]
                messages += turn
                steps = self._play_turn(question, owner, messages, chat, self.tools_of(functions))
                if len(steps) > self._prompts.MAXIMUM_STEP_LIMIT:
                    return messages, False
                done.append(steps)
            with self._lock:
                checked = self._check_turns(
                    done, question.truth, question.checked, question.category, owner
                )
            return messages, bool(checked["valid"])
        finally:
            worlds = vars(self._world)
            for name in [name for name in worlds if name.startswith(owner)]:
                del worlds[name]

    def _play_turn(
        self,
        question: LeaderboardQuestion,
        owner: str,
        messages: list[Message],
        chat: Chat,
        tools: list[dict[str, Any]],
    ) -> list[list[str]]:
        """Extend a conversation to the end of the model's turn; return its calls by step."""
        steps: list[list[str]] = []
        while len(steps) <= self._prompts.MAXIMUM_STEP_LIMIT:
            messages.append(chat(messages, tools=tools))
            calls = _calls_of(messages[-1])
            if not calls:
                break
            _, apis = self._run(question, owner, [])
            steps.append([self._expression(call, apis.values()) for call in calls])
            results, _ = self._run(question, owner, steps[-1])
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(messages[-1]["tool_calls"], results, strict=True)
            ]
        return steps

    def _run(
        self, question: LeaderboardQuestion, owner: str, calls: list[str]
    ) -> tuple[list[str], Any]:
        """Return results of calls, and the simulated APIs."""
        entry = question.shown
        with self._lock:  # the calculator's precision belongs to the process
            ran: tuple[list[str], Any] = self._world.execute_multi_turn_func_call(
                calls,
                entry["initial_config"],
                entry["involved_classes"],
                owner,
                question.id,
                long_context="long_context" in question.category,
            )
        return ran

    def _expression(self, call: dict[str, Any], apis: Any) -> str:
        """Return a call as the package evaluates it: of a method, with names and plain values."""
        ((name, arguments),) = call.items()
        large = [key for key in _DIGITS if not _is_small(arguments.get(key))]
        if (
            not name.isidentifier()
            or name.startswith("_")
            or not any(inspect.ismethod(getattr(api, name, None)) for api in apis)
            or not all(key.isidentifier() for key in arguments)
            or large
        ):
            return "unknown_call()"
        (expression,) = self._handler.convert_to_function_call([call])
        return str(expression)


def _calls_of(reply: Message) -> list[dict[str, Any]]:
    """Return a reply's calls in the checker's form, `{name: arguments}`; none if one is malformed."""
    functions = [call["function"] for call in reply.get("tool_calls") or ()]
    try:
        calls = [{one["name"]: json.loads(one["arguments"])} for one in functions]
    except (ValueError, RecursionError):
        return []
    return calls if all(isinstance(one, dict) for call in calls for one in call.values()) else []


def _is_small(value: object) -> bool:
    return not isinstance(value, int) or abs(value) <= _MAX_DIGITS
