"""Workloads to measure: groups of random turns whose contexts develop like those of agents."""

from dataclasses import dataclass, replace

import numpy as np

from agentrl.data import SelectedGroup, TokenTree
from agentrl.data.tokens import TurnTokens

VOCABULARY = 640
"""Token ids are below this, whatever the model's vocabulary is."""


@dataclass(frozen=True)
class Workload:
    """Shape of a step; a record is a conversation of `num_turns` model calls."""

    num_groups: int
    num_records: int
    prompt_tokens: int
    num_turns: int
    sampled_tokens: int
    tool_tokens: int
    strip_thinking: bool = False
    """Whether a later prompt omits the first half of a turn's sampled tokens."""
    edit_every: int = 0
    """Interval in turns at which an old tool result is replaced by a stub, shifting all later
    tokens.
    """
    sub_agent_every: int = 0
    """Interval in turns at which a sub-agent with its own prompt is called; its answer is the
    result.
    """
    sub_agent_turns: int = 3

    @property
    def extends_itself(self) -> bool:
        """Return whether merging within a record merges anything."""
        return self.num_turns > 1 and not self.strip_thinking

    def resized(self, factor: float) -> "Workload":
        """Return the workload with all lengths multiplied."""
        return replace(
            self,
            prompt_tokens=max(1, round(self.prompt_tokens * factor)),
            sampled_tokens=max(2, round(self.sampled_tokens * factor)),
            tool_tokens=max(1, round(self.tool_tokens * factor)),
        )


SMALL = {
    # The demo: eight records that share a system prompt with tool schemas.
    "star": Workload(8, 8, 150, 3, 20, 20),
    # One long conversation, which only merging within the record can share.
    "chain": Workload(2, 1, 100, 20, 20, 20),
    # Thinking is cut from the history, so every turn leaves a stub.
    "think_strip": Workload(2, 1, 100, 20, 20, 20, strip_thinking=True),
    # Four records of a long task: contexts are edited, sub-agents share their prompt.
    "branching": Workload(1, 4, 150, 12, 20, 20, edit_every=4, sub_agent_every=3),
}
"""Sizes that two CPU cores can run many times."""

LONG = {
    # G = 8, P = 4k, R = 1k: attention is most of the work.
    "star_5k": Workload(1, 8, 4096, 1, 1024, 1),
    # Conversations of 6k and 4k tokens in 20 turns.
    "chain_6k": Workload(1, 1, 1024, 20, 192, 64),
    "think_strip_4k": Workload(1, 1, 1024, 20, 120, 80, strip_thinking=True),
}
"""Sizes that two CPU cores can run a few times."""

LARGE = {
    # G = 8, P = 4k, R = 1k at 12k tokens of tree.
    "star": Workload(1, 8, 4096, 1, 1024, 1),
    "chain": Workload(1, 1, 1024, 20, 512, 256),
    "think_strip": Workload(1, 1, 1024, 20, 512, 256, strip_thinking=True),
    "branching": Workload(1, 4, 1024, 12, 256, 128, edit_every=4, sub_agent_every=3),
}
"""Sizes for a GPU; `of_tree_size` scales them to a setting."""


AGENTS = {
    # The first run of a pretrained model on a GPU: 34 groups of short branches, three turns each.
    "shop": Workload(34, 8, 340, 3, 7, 6),
    "agents": Workload(32, 8, 420, 3, 30, 30),
    "star": Workload(1, 8, 5500, 1, 1400, 1),
    "conversations": Workload(4, 1, 1, 1, 16384, 1),
    # Where merging has the least to win: long answers that share a short prompt.
    "answers": Workload(2, 4, 512, 1, 12288, 1),
}
"""Trees that agents make, and others beside them."""


def of_tree_size(workload: Workload, num_tokens: int) -> Workload:
    """Return the workload scaled to about this many tokens in all its trees."""

    def size(of: Workload) -> int:
        return sum(TokenTree.from_tokens(group.turns).num_tokens for group in make_groups(of))

    return workload.resized(num_tokens / size(workload))


def single_row(num_tokens: int, num_rows: int = 1) -> Workload:
    """Return conversations of one turn each, sampled from the second token on."""
    return Workload(num_rows, 1, 1, 1, num_tokens, 1)


def make_groups(workload: Workload, seed: int = 0) -> list[SelectedGroup]:
    """Return random groups of the workload's shape with random advantages."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(workload.num_groups):
        prompt, sub_prompt = (rng.integers(0, VOCABULARY, workload.prompt_tokens) for _ in range(2))
        records = [
            _Record(workload, f"{number}/{record}", rng).play(prompt, sub_prompt)
            for record in range(workload.num_records)
        ]
        turns = tuple(turn for record in records for turn in record)
        record_ids = tuple(dict.fromkeys(turn.record_id for turn in turns))
        groups.append(SelectedGroup(str(number), record_ids, (), turns))
    return groups


class _Record:
    """One conversation under construction."""

    def __init__(self, workload: Workload, record_id: str, rng: np.random.Generator) -> None:
        self._workload = workload
        self._record_id = record_id
        self._rng = rng
        self._advantage = float(rng.choice([-1.0, 1.0]))
        self._turns: list[TurnTokens] = []
        self._num_chains = 0

    def play(self, prompt: np.ndarray, sub_prompt: np.ndarray) -> list[TurnTokens]:
        workload = self._workload
        parts = [prompt]  # the context, message by message: prompt, reply, result, reply, ...
        chain = self._new_chain()
        for index in range(1, workload.num_turns + 1):
            output = self._sample(np.concatenate(parts), chain)
            result = self._tokens(workload.tool_tokens)
            if _is_due(index, workload.sub_agent_every):
                result = self._ask_sub_agent(sub_prompt)
            kept = output[len(output) // 2 :] if workload.strip_thinking else output
            parts += [kept, result]
            if workload.strip_thinking:
                chain = self._new_chain()
            if _is_due(index, workload.edit_every):
                oldest = 2 * (index - workload.edit_every + 1)  # result that is still complete
                parts[oldest] = parts[oldest][:1]
                chain = self._new_chain()
        return self._turns

    def _ask_sub_agent(self, prompt: np.ndarray) -> np.ndarray:
        context, chain = prompt, self._new_chain()
        output = prompt[:0]
        for _ in range(self._workload.sub_agent_turns):
            output = self._sample(context, chain)
            context = np.concatenate([context, output, self._tokens(self._workload.tool_tokens)])
        return output

    def _sample(self, context: np.ndarray, chain: int) -> np.ndarray:
        output = self._tokens(self._workload.sampled_tokens)
        self._turns.append(
            TurnTokens(
                turn_id=f"{self._record_id}/{len(self._turns)}",
                record_id=self._record_id,
                chain=chain,
                full_ids=np.concatenate([context, output]).astype(np.int32),
                num_prompt_tokens=len(context),
                behavior_logprobs=np.full(len(output), -6.0, dtype=np.float32),
                versions=np.zeros(len(output), dtype=np.int32),
                advantage=self._advantage,
            )
        )
        return output

    def _tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, VOCABULARY, count)

    def _new_chain(self) -> int:
        self._num_chains += 1
        return self._num_chains - 1


def _is_due(index: int, every: int) -> bool:
    return every > 0 and index % every == 0
