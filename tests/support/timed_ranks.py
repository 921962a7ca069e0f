"""Time two packings on gloo ranks, of which each is slow at another one.

    torchrun --nproc_per_node 2 tests/support/timed_ranks.py FOLDER

Every rank leaves `FOLDER/RANK.txt` with the seconds that it was told.
"""

import os
import sys
from itertools import count
from pathlib import Path

from harness.trees import tiny_policy

from agentrl.distributed import joined_ranks
from agentrl.trainer.learner.merge_timing import packing_seconds

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
READINGS = count()


def clock() -> float:
    """Rank 0 takes 2 s and 3 s for the packings, rank 1 takes 5 s and 1 s."""
    number = next(READINGS)
    is_end, packing = number % 2, number // 2 % 2
    return is_end * ([2.0, 3.0], [5.0, 1.0])[rank][packing]


with joined_ranks() as ranks:
    found = packing_seconds(tiny_policy(), [[], []], accumulate=len, ranks=ranks, clock=clock)
(folder / f"{rank}.txt").write_text(repr(found))
