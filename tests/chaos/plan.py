"""What is done to whom and when: drawn from a seed before anything starts, so that it replays."""

import random
from dataclasses import dataclass
from typing import Literal

KINDS = ("sampler", "scorer", "trainer", "mongod")
WEIGHTS = (45, 20, 15, 20)
SAMPLERS = ("sampler-a", "sampler-b", "sampler-c")
STALLS_PER_KILL = 0.1
TRAINER_UP_SECONDS = (1.0, 6.0)


@dataclass(frozen=True)
class Strike:
    """One blow."""

    pause_seconds: float
    """Time since the last one."""
    victim: str
    """A sampler's name, or the kind of the others."""
    how: Literal["kill", "stall"] = "kill"
    """A stalled process sleeps until its leases are gone, and wakes up as a stale holder."""
    up_seconds: float = 0.0
    """The victim is left alone for so long after its start: a trainer that never gets through a
    step has nothing to lose."""

    @property
    def kind(self) -> str:
        """The sort of process that is struck."""
        return self.victim.partition("-")[0]


def plan(kills: int, seed: int, pause_seconds: tuple[float, float]) -> list[Strike]:
    """Draw a schedule: each kind once in the beginning, then by weight; stalls in between."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, min(kills, len(KINDS)))
    kinds += rng.choices(KINDS, WEIGHTS, k=kills - len(kinds))
    strikes = []
    for kind in kinds:
        pause = rng.uniform(*pause_seconds)
        victim = rng.choice(SAMPLERS) if kind == "sampler" else kind
        up = rng.uniform(*TRAINER_UP_SECONDS) if kind == "trainer" else 0.0
        strikes.append(Strike(pause, victim, "kill", up))
        if rng.random() < STALLS_PER_KILL:
            strikes.append(Strike(rng.uniform(*pause_seconds), rng.choice(SAMPLERS), "stall"))
    return strikes
