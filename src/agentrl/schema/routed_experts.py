"""The experts that a server's routers chose for the tokens of a turn, as turns store them.

A turn of A added and T sampled tokens stores the experts of the tokens that it was the first to
compute: the last shared token, which its parent may not have computed, and all added and sampled
tokens except the last, which is never computed.

Shape legend: N tokens, W = layers * experts a token.
"""

from typing import Literal

import numpy as np

from agentrl.schema.turn import DispatchedSamplingTask


def first_routed(shared_len: int) -> int:
    """Return the position of the first token whose experts a turn stores."""
    return max(shared_len - 1, 0)


def pack_experts(experts: np.ndarray) -> tuple[bytes, Literal[1, 2]]:
    """Return the stored form of experts [N, W] and the bytes that one of them takes.

    Entries for layers without experts carry no information and may be negative; they become 0.
    """
    size: Literal[1, 2] = 1 if experts.max(initial=0) < 2**8 else 2
    return np.maximum(experts, 0).astype(f"<u{size}").tobytes(), size


def stored_experts(turn: DispatchedSamplingTask) -> np.ndarray | None:
    """Return the experts that a turn stores, int16 [N, W], or None where it stores none.

    Raises:
        ValueError: the number of experts is not a multiple of the number of tokens.
    """
    if not turn.routed_experts:
        return None
    flat = np.frombuffer(turn.routed_experts, dtype=f"<u{turn.routed_bytes}").astype(np.int16)
    num_full = turn.shared_len + len(turn.added_ids) + len(turn.output_ids)
    num_tokens = num_full - 1 - first_routed(turn.shared_len)
    if num_tokens <= 0 or len(flat) % num_tokens:
        raise ValueError(f"turn {turn.id} has {len(flat)} experts for {num_tokens} tokens")
    return flat.reshape(num_tokens, -1)
