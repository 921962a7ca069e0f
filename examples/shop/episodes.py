# ruff: noqa: N803, N806  (tensor names end in their shape)
"""Episodes of the demo task as tokens: demonstrations to imitate, and rollouts to evaluate.

Both build the context in the same way: the rendered prompt, then in turns the sampled ids and the
ids of the text that a tool result appends. Sampled ids are never decoded and encoded again.

Shapes: B episodes, T tokens, V vocabulary.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.data.tokens import TurnTokens
from examples.shop.demonstrations import FLAWLESS, TOOL_SCHEMAS, Call, Habits, solve
from examples.shop.questions import Asked, Question
from examples.shop.server import Catalogue, ToolInputError, call_tool
from examples.shop.tokenizer import END_OF_TEXT, TURN_END

MAX_TURNS = 5
MAX_TURN_TOKENS = 32
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass
class Episode:
    """One attempt at a question; `sampled` marks the tokens that the assistant wrote."""

    question: Asked
    ids: list[int]
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Behavior logprobs; 0 where not sampled."""
    num_turns: int = 0
    reward: float = 0.0

    def __post_init__(self) -> None:
        self.sampled = [False] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)

    def extend(self, ids: list[int], *, sampled: bool, logprobs: list[float] | None = None) -> None:
        """Append tokens that were sampled, or that the environment added."""
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)


class Codec:
    """The demo's tokenizer with the parts of its chat template, rendered once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
        assert isinstance(turn_end, int)
        self.turn_end = turn_end
        pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        assert isinstance(pad, int)
        self.pad = pad
        self.prefix = self._common_prefix()

    def prompt(self, question: str) -> list[int]:
        """Ids of the first prompt, tools included."""
        text = self._render([{"role": "user", "content": question}], generate=True)
        return self.encode(text)

    def tool_result(self, text: str) -> list[int]:
        """Ids that a tool result appends after the assistant's end-of-turn token."""
        return self._tool_result(text)

    def encode(self, text: str) -> list[int]:
        """Ids of trusted text, whose markup becomes special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, end-of-turn token removed."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        assert isinstance(text, str)
        return text.removesuffix(TURN_END)

    def _render(self, messages: list[dict[str, str]], *, generate: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tools=list(TOOL_SCHEMAS), add_generation_prompt=generate, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def _common_prefix(self) -> list[int]:
        """Ids at the start of every prompt of the task."""
        one, two = self.prompt("A"), self.prompt("B")
        length = next(i for i, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
        return one[:length]

    @cache  # noqa: B019  (one codec per process, some thousand distinct results)
    def _tool_result(self, text: str) -> list[int]:
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        after = [*before, {"role": "tool", "content": text}]
        start = self._render(before, generate=False).rindex(TURN_END) + len(TURN_END)
        return self.encode(self._render(after, generate=True)[start:])


def call_body(tool: str, arguments: dict[str, Any]) -> str:
    """Return the text between the tool-call tags."""
    return "\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n"


def call_text(tool: str, arguments: dict[str, Any]) -> str:
    """The assistant's text of one tool call."""
    return f"<tool_call>{call_body(tool, arguments)}</tool_call>"


def demonstrate(
    codec: Codec, question: Question, draw: random.Random, habits: Habits = FLAWLESS
) -> Episode:
    """Demonstrate a question with the correct protocol, and choices according to the habits."""
    solution = solve(question, draw, habits)
    episode = demonstrated(codec, question, solution.calls, solution.answer)
    episode.reward = float(solution.is_right)
    return episode


def demonstrated(codec: Codec, question: Asked, calls: Sequence[Call], answer: str) -> Episode:
    """Return the episode that makes these calls, one a turn, and then answers."""
    episode = Episode(question, codec.prompt(question.text))

    def turn(text: str) -> None:
        episode.extend([*codec.encode(text), codec.turn_end], sampled=True)
        episode.num_turns += 1

    for call in calls:
        turn(call_text(call.tool, call.arguments))
        episode.extend(codec.tool_result(call.result), sampled=False)
    turn(f"<answer>{answer}</answer>")
    return episode


@torch.no_grad()
def play(
    model: PreTrainedModel,
    codec: Codec,
    catalogue: Catalogue,
    questions: Sequence[Asked],
    *,
    temperature: float = 1.0,
    max_turns: int = MAX_TURNS,
) -> list[Episode]:
    """Let the model answer the questions as one batch; tools run in this process.

    `temperature` 0 takes the likeliest token.
    """
    episodes = [Episode(question, codec.prompt(question.text)) for question in questions]
    batch = _Batch(model, codec, len(episodes))
    running = episodes
    new = [episode.ids[len(codec.prefix) :] for episode in episodes]
    while running:
        sampled, logprobs = batch.sample_turn(new, temperature)
        new, alive = [], []
        for index, episode in enumerate(running):
            episode.extend(sampled[index], sampled=True, logprobs=logprobs[index])
            episode.num_turns += 1
            observation = _react(codec, catalogue, episode, sampled[index])
            if observation is not None and episode.num_turns < max_turns:
                episode.extend(observation, sampled=False)
                new.append(observation)
                alive.append(index)
        running = [running[index] for index in alive]
        batch.keep(alive)
    return episodes


def _react(
    codec: Codec, catalogue: Catalogue, episode: Episode, sampled: list[int]
) -> list[int] | None:
    """Answer a turn with a tool result's ids, or None when the episode is over."""
    text = codec.decode(sampled)
    answer = _ANSWER.search(text)
    if answer:
        truth = episode.question.answer(catalogue)
        episode.reward = float(answer[1].strip() == truth)
        return None
    call = _CALL.search(text)
    if call is None or sampled[-1] != codec.turn_end:
        return None
    try:
        parsed = json.loads(call[1])
        result = call_tool(catalogue, parsed["name"], parsed["arguments"])
    except ToolInputError as error:
        result = str(error)
    except (ValueError, KeyError, TypeError) as error:
        result = f"malformed tool call: {error}"
    return codec.tool_result(result)


class _Batch:
    """A key-value cache of B running episodes that share a prefix."""

    def __init__(self, model: PreTrainedModel, codec: Codec, size: int) -> None:
        self.model, self.codec = model, codec
        self.cache = DynamicCache(config=model.config)
        model(torch.tensor([codec.prefix]), past_key_values=self.cache, use_cache=True)
        self.cache.batch_repeat_interleave(size)
        self.mask_BT = torch.ones(size, len(codec.prefix), dtype=torch.long)

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows."""
        if rows:
            index = torch.tensor(rows)
            self.cache.batch_select_indices(index)
            self.mask_BT = self.mask_BT[index]

    def sample_turn(
        self, new: list[list[int]], temperature: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Append each row's new tokens, then sample each row to its end of turn.

        Returns:
            Sampled ids and their logprobs, row by row.
        """
        width = max(map(len, new))
        input_BT = torch.tensor([[0] * (width - len(row)) + row for row in new])
        real_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in new])
        ids: list[list[int]] = [[] for _ in new]
        logprobs: list[list[float]] = [[] for _ in new]
        for _ in range(MAX_TURN_TOKENS):
            logp_BV = self._forward(input_BT, real_BT)
            scores_BV = logp_BV / temperature if temperature else logp_BV
            token_B1 = (
                torch.multinomial(scores_BV.softmax(-1), 1)
                if temperature
                else scores_BV.argmax(-1, keepdim=True)
            )
            chosen_B1 = logp_BV.gather(-1, token_B1)
            pairs = zip(token_B1[:, 0].tolist(), chosen_B1[:, 0].tolist(), strict=True)
            for row, (token, logprob) in enumerate(pairs):
                if not self._ended(ids[row]):
                    ids[row].append(token)
                    logprobs[row].append(logprob)
                    real_BT[row, -1] = 1
                else:
                    real_BT[row, -1] = 0
            input_BT, real_BT = token_B1, real_BT[:, -1:].clone()
            if all(self._ended(row) for row in ids):
                break
        # The cache lacks the last token's keys, which the next turn needs.
        self._forward(input_BT, real_BT)
        return ids, logprobs

    def _ended(self, row: list[int]) -> bool:
        return bool(row) and row[-1] == self.codec.turn_end

    def _forward(self, input_BT: Tensor, real_BT: Tensor) -> Tensor:
        start_B = self.mask_BT.sum(-1, keepdim=True)
        position_BT = (start_B + real_BT.cumsum(-1) - 1).clamp(min=0)
        self.mask_BT = torch.cat([self.mask_BT, real_BT], dim=-1)
        logits_BTV: torch.Tensor = self.model(
            input_BT,
            attention_mask=self.mask_BT,
            position_ids=position_BT,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits_BTV[:, -1].log_softmax(-1)


def episode_turns(episode: Episode, name: str, *, num_left_out: int = 0) -> list[TurnTokens]:
    """Return the assistant's messages as turns for the trainer.

    The first `num_left_out` tokens of the context are omitted.
    """
    ids = np.array(episode.ids[num_left_out:], dtype=np.int32)
    sampled = np.array(episode.sampled[num_left_out:], dtype=np.int8)
    edges = np.flatnonzero(np.diff(sampled, prepend=0, append=0)).reshape(-1, 2).tolist()
    return [
        TurnTokens(
            turn_id=f"{name}/{index}",
            record_id=name,
            chain=0,
            full_ids=ids[:end],
            num_prompt_tokens=start,
            behavior_logprobs=np.array(
                episode.logprobs[num_left_out + start : num_left_out + end], dtype=np.float32
            ),
            versions=np.zeros(end - start, dtype=np.int32),
        )
        for index, (start, end) in enumerate(edges)
    ]
