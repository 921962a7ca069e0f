"""What is done to whom and when: drawn from a seed before anything starts, so that it replays."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "sampler",
    "scorer",
    "trainer",
    "supervisor",
    "tools",
    "launcher",
    "stall",
    "mongod",
    "freeze",
    "disk",
    "network",
    "primary",
    "secondary",
    "step_down",
    "checkpoint",
    "memory",
    "control",
    "stop",
    "export",
]
PROCESSES: Mapping[Kind, int] = {
    "sampler": 45,
    "scorer": 20,
    "trainer": 15,
    "mongod": 20,
    "stall": 10,
}
"""Kinds of faults with their weights: kills of processes, and samplers that stand still (`stall`)."""
EVERYTHING: Mapping[Kind, int] = {
    "sampler": 20,
    "scorer": 8,
    "trainer": 10,
    "supervisor": 6,
    "tools": 8,
    "launcher": 3,
    "stall": 8,
    "mongod": 8,
    "freeze": 4,
    "disk": 4,
    "network": 18,
    "checkpoint": 6,
    "memory": 5,
    "control": 6,
    "stop": 8,
    "export": 4,
}
"""What one mongod, its network and the run's files go through; `freeze` lets the mongod stand still,
and `stop` ends one process with a signal that it may answer."""
ELECTIONS: Mapping[Kind, int] = {
    "sampler": 15,
    "scorer": 5,
    "trainer": 10,
    "stall": 5,
    "primary": 25,
    "secondary": 10,
    "step_down": 30,
}
"""What a replica set of three goes through."""
SAMPLERS = ("sampler-a", "sampler-b", "sampler-c")
LINKS = (
    *(f"{name}>mongod" for name in (*SAMPLERS, "scorer", "trainer", "supervisor")),
    *(f"{name}>tools" for name in SAMPLERS),
    "everyone>engine",
)
BAD_CONTROLS: Mapping[str, Any] = {
    "temperature": 1e9,
    "max_staleness": -5,
    "scorer": "of_another_release",
}
STOPPABLE = (*SAMPLERS, "scorer", "supervisor")
TRAINER_UP_SECONDS = (1.0, 6.0)
STOPPED_UP_SECONDS = 6.0
BAD_CONTROL_SECONDS = 7.0
LITTLE_MEMORY_SECONDS = 4.0
HOLE_SECONDS = (0.3, 6.0)


@dataclass(frozen=True)
class Strike:
    """One fault."""

    pause_seconds: float
    """Time since the last one."""
    kind: Kind
    victim: str
    """Name of a process or of a link."""
    seconds: float = 0.0
    """How long a hole lasts. For a process that is killed: how long it is
    left alone after its start; a trainer that never gets through a step has nothing to lose."""
    how: str = ""
    """Which hole of the network, which damage, which control, or which signal."""


def plan(
    faults: int, seed: int, pause_seconds: tuple[float, float], weights: Mapping[Kind, int]
) -> list[Strike]:
    """Draw a schedule: each kind once in the beginning, then by weight."""
    rng = random.Random(seed)
    kinds: Sequence[Kind] = list(weights)
    drawn = rng.sample(kinds, min(faults, len(kinds)))
    drawn += rng.choices(kinds, list(weights.values()), k=faults - len(drawn))
    return [_strike(kind, rng, rng.uniform(*pause_seconds)) for kind in drawn]


def _strike(kind: Kind, rng: random.Random, pause: float) -> Strike:
    if kind in ("sampler", "stall"):
        return Strike(pause, kind, rng.choice(SAMPLERS))
    if kind == "trainer":
        return Strike(pause, kind, kind, rng.uniform(*TRAINER_UP_SECONDS))
    if kind == "network":
        how = "cut" if rng.random() < 0.5 else "silence"
        return Strike(pause, kind, rng.choice(LINKS), rng.uniform(*HOLE_SECONDS), how)
    if kind == "stop":
        signal = rng.choice(["SIGTERM", "SIGINT"])
        return Strike(pause, kind, rng.choice(STOPPABLE), STOPPED_UP_SECONDS, signal)
    return _strike_of_state(kind, rng, pause)


def _strike_of_state(kind: Kind, rng: random.Random, pause: float) -> Strike:
    """Draw a fault of files, memory or settings."""
    if kind == "checkpoint":
        return Strike(pause, kind, "trainer", how=rng.choice(["flip", "cut"]))
    if kind == "control":
        return Strike(pause, kind, "run", BAD_CONTROL_SECONDS, rng.choice(sorted(BAD_CONTROLS)))
    if kind == "memory":
        return Strike(pause, kind, "engine", LITTLE_MEMORY_SECONDS)
    return Strike(pause, kind, kind)
