"""Whether tokens are of the policy versions that their spans name."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from support.engines import Oracle

from agentrl.schema import DispatchedSamplingTask, rebuild_prompts


def check_versions(
    conversations: Iterable[Sequence[DispatchedSamplingTask]], policies: Path
) -> int:
    """Recompute all logprobs with the weights of the named versions.

    Args:
        conversations: all turns of each record, in order.
        policies: directory of the published versions.

    Returns:
        The number of spans that were compared.
    """
    oracle = Oracle()
    num_spans = 0
    for turns in conversations:
        for turn, prompt in zip(turns, rebuild_prompts(turns), strict=True):
            for span in turn.version_spans:
                policy = policies / f"{span.version:06d}"
                expected = oracle.logprobs(policy, prompt, turn.output_ids)
                np.testing.assert_allclose(
                    turn.output_logprobs[span.start : span.end],
                    expected[span.start : span.end],
                    atol=1e-4,
                    err_msg=f"{turn.id} {turn.version_spans}",
                )
                num_spans += 1
    return num_spans
