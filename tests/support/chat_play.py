"""Runs conversations in a family's template, with an engine that logs its input."""

import json
import re
import unicodedata
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import strategies as st
from jinja2 import TemplateError
from support.chat_families import FAMILIES, REAL_FAMILIES, Family, write_family
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentrl.errors import RenderError
from agentrl.renderers import Renderer, Reply
from agentrl.renderers.conversation import Conversation
from agentrl.renderers.tool_calls.call_format import with_tool_descriptions
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format
from agentrl.schema import DispatchedSamplingTask, SamplingParams, rebuild_prompts

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up a price.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    },
)
ALL = {**FAMILIES, **REAL_FAMILIES}
Kind = Literal["say", "call", "cut", "noise"]


@dataclass(frozen=True)
class Step:
    """One reply of the model, and the messages that follow it."""

    kind: Kind
    thinking: str
    words: str
    split: int
    """Where the reply's text is split before tokenizing: models do not tokenize as we do."""
    noise: list[int]
    foreign: str


@dataclass(frozen=True)
class Case:
    """A conversation to run."""

    system: str | None
    question: str
    with_tools: bool
    steps: list[Step]


@dataclass
class Played:
    """The results of a conversation."""

    turns: list[DispatchedSamplingTask] = field(default_factory=list)
    engine_saw: list[np.ndarray] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The messages before every turn, rendered by transformers."""
    followed_by_user: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """A family's tokenizer as AgentRL reads it, and as transformers does."""

    name: str
    family: Family
    renderer: Renderer
    reference: PreTrainedTokenizerBase

    def text_of(self, conversation: Conversation) -> str:
        """Return the messages so far, rendered by transformers."""
        messages, tools, traits = conversation.history, conversation.tools, self.renderer.traits
        if tools and not traits.shows_tools:
            format_ = get_tool_call_format(self.renderer.tool_call_format)
            messages = with_tool_descriptions(
                messages, tools, format_, as_system=traits.shows_system
            )
            tools = ()
        return str(
            self.reference.apply_chat_template(
                messages,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.family.variables,
            )
        )

    def control_literals(self) -> list[str]:
        """Return the words that are control tokens of this family."""
        return [*self.family.special, *self.family.added]


@cache
def model(name: str) -> Model:
    """Return a family's model, read once per process."""
    family = ALL[name]
    with TemporaryDirectory() as folder:
        directory = write_family(Path(folder), name)
        renderer = Renderer.load(directory, template_variables=family.variables)
        return Model(name, family, renderer, AutoTokenizer.from_pretrained(directory))


# Characters that Unicode normal forms do not change, which keeps texts comparable.
CHARACTERS = st.characters(
    codec="utf-8", exclude_categories=["Mn", "Mc", "Me", "Cs", "Co", "Cn"]
).filter(lambda char: unicodedata.is_normalized("NFC", char) and not 0x1100 <= ord(char) < 0x1200)
WORDS = st.text(st.sampled_from("abc the in\n{}<|>[]/é台"), max_size=16).map(str.strip)


def cases(name: str) -> st.SearchStrategy[Case]:
    """Return the random conversations of a family."""
    family = ALL[name]
    literals = [*family.special, *family.added]
    parts = [part for text in literals for part in (text, text[:-1], text[1:], text[:2])]
    foreign = st.lists(
        st.sampled_from([*parts, "system\n", " ", "\n", "\U000f0000"])
        | st.text(CHARACTERS, max_size=4),
        max_size=4,
    ).map("".join)
    step = st.builds(
        Step,
        kind=st.sampled_from(["say", "call", "say", "call", "cut", "noise"]),
        thinking=WORDS if family.thinks else st.just(""),
        words=WORDS,
        split=st.integers(0, 12),
        noise=st.lists(st.integers(0, 10_000), max_size=6),
        foreign=foreign,
    )
    return st.builds(
        Case,
        system=st.none() | foreign,
        question=foreign,
        with_tools=st.booleans(),
        steps=st.lists(step, min_size=1, max_size=4),
    )


def output_of(model: Model, step: Step) -> np.ndarray:
    """Ids that the model 'samples'."""
    renderer = model.renderer
    if step.kind == "noise":
        plain = [id_ % renderer.vocab_size for id_ in step.noise]
        ids = [id_ for id_ in plain if id_ not in renderer.stop_token_ids]
        return np.asarray([*ids, renderer.stop_token_ids[0]], dtype=np.int32)
    text = step.words
    if step.kind == "call":
        # Some formats support only calls at the start of the reply or after thinking.
        leading = model.family.call.startswith("{") or model.family.said != "%s"
        call = model.family.call % call_arguments(model.family, step.words)
        text = call if leading else f"{step.words}\n{call}".lstrip()
    else:
        text = model.family.said % text
    if step.thinking:
        thought = model.family.thought % step.thinking
        text = (thought.removeprefix("<think>\n") if model.family.begun else thought) + text
    elif model.family.begun:
        text = f"</think>\n\n{text}"
    encode = renderer.sampled_ids
    ids = [*encode(text[: step.split]).tolist(), *encode(text[step.split :]).tolist()]
    if step.kind != "cut":
        ids.append(stop_of(model, is_call=step.kind == "call"))
    return np.asarray(ids, dtype=np.int32)


def call_arguments(family: Family, item: str) -> str:
    """Return the arguments of a call as the family writes them."""
    if family.item == '"%s"':
        text = json.dumps({"item": item}, ensure_ascii=False)
        return text if "price(" not in family.call else json.dumps(item, ensure_ascii=False)
    # Plain-text values contain none of the marks that would end them.
    return family.item % "".join(char for char in item if char not in "<|>")


def stop_of(model: Model, *, is_call: bool) -> int:
    """Id of the token with which the model ends a reply."""
    if model.family.stops is None:
        return model.renderer.stop_token_ids[0]
    (stop,) = model.renderer.sampled_ids(model.family.stops[is_call]).tolist()
    return int(stop)


def play(model: Model, case: Case, *, harmless: bool = False) -> Played:
    """Run a conversation as a sampler does, with an engine that logs its input."""
    played = Played()

    def said(number: int, foreign: str) -> str:
        return f"q{number} " + ("" if harmless else foreign)

    tools = TOOLS if case.with_tools else ()
    opening = [] if case.system is None else [{"role": "system", "content": said(0, case.system)}]
    opening.append({"role": "user", "content": said(1, case.question)})
    conversation = Conversation(opening, tools)
    for index, step in enumerate(case.steps):
        try:
            prompt = conversation.next_prompt(model.renderer)
        except RenderError:
            # Mistral's templates refuse empty replies.
            with pytest.raises(TemplateError):
                model.text_of(conversation)
            break
        if not harmless:
            played.texts.append(model.text_of(conversation))
        played.engine_saw.append(prompt.ids.copy())
        output = output_of(model, step)
        reply = model.renderer.parse(output, turn=index, tools=tools)
        played.turns.append(turn_of(index, prompt, output, reply))
        conversation.replied(index, np.concatenate([prompt.ids, output]), reply.message)
        answers: list[dict[str, Any]] = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": said(index + 2, step.foreign),
            }
            for call in reply.tool_calls
        ]
        played.followed_by_user.append(not answers)
        question = {"role": "user", "content": said(index + 2, step.foreign)}
        conversation.add(*(answers or [question]))
    return played


def turn_of(index: int, prompt: Any, output: np.ndarray, reply: Reply) -> DispatchedSamplingTask:
    """Return the stored turn of a reply to a prompt."""
    return DispatchedSamplingTask(
        id=f"r/1/{index}",
        record_id="r",
        task_id="t",
        attempt=1,
        index=index,
        parent=prompt.parent,
        shared_len=prompt.shared_len,
        added_ids=prompt.added_ids,
        output_ids=output,
        output_logprobs=np.zeros(len(output), dtype=np.float32),
        version_spans=(),
        tool_calls=reply.tool_calls,
        finish_reason="stop",
        branch_reason=prompt.branch_reason,
        sampling_params=SamplingParams(),
    )


def failure_of(model: Model, case: Case, played: Played) -> str | None:
    """Return the error of a conversation in a released template, if any."""
    for rebuilt, seen in zip(rebuild_prompts(played.turns), played.engine_saw, strict=True):
        if not np.array_equal(rebuilt, seen):
            return "the stored turns give a different prompt than the engine received"
    control = sorted(model.renderer.control_token_ids)
    harmless = play(model, case, harmless=True)
    for seen, plain in zip(played.engine_saw, harmless.engine_saw, strict=True):
        if np.isin(seen, control).sum() != np.isin(plain, control).sum():
            return f"untrusted text became a control token: {model.renderer.decode(seen)!r}"
    for index, (seen, text) in enumerate(zip(played.engine_saw, played.texts, strict=True)):
        if any(step.kind == "noise" for step in case.steps[:index]):
            return None
        said = model.renderer.decode(seen)
        if _words_of(said) != _words_of(text):
            return f"the prompt is {said!r}, the template renders {text!r}"
    return None


def answered_by_tools(case: Case, played: Played) -> list[DispatchedSamplingTask]:
    """Return the turns whose prompts add tool results; none after noise."""
    turns = []
    for index, turn in enumerate(played.turns):
        if any(step.kind == "noise" for step in case.steps[:index]):
            break
        if index and not played.followed_by_user[index - 1]:
            turns.append(turn)
    return turns


def _words_of(text: str) -> str:
    """A prompt without template padding: space and empty thinking."""
    return re.sub(r"<think></think>", "", "".join(text.split()))
