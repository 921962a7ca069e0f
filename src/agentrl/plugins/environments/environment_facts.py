"""Kinds of environments: what is known of each one before its package is imported.

`environments.environment_kinds` implements them, in the interpreters that have the packages.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EnvironmentFacts:
    """What flags and messages depend on."""

    packages: str = ""
    """What `pip` installs for it; empty if it needs no package."""
    is_seeded: bool = False
    """Whether its tasks are drawn with a seed."""
    is_replayable: bool = False
    """Whether the same replies lead a task to the same state, so that a rollout can start at a turn of
    another by repeating its replies; `?replayable=true` declares it for one environment."""
    starts_programs: bool = False
    """Whether its rollouts start their own programs, on the cores of the sampler's machine."""


ENVIRONMENTS = {
    "reasoning_gym": EnvironmentFacts("reasoning-gym==0.1.25", is_seeded=True, is_replayable=True),
    "textarena": EnvironmentFacts("textarena==0.7.4", is_seeded=True, is_replayable=True),
    # Its harnesses are programs that uv runs.
    "verifiers": EnvironmentFacts("verifiers==0.4.0 uv", starts_programs=True),
    "openenv": EnvironmentFacts("openenv-core==0.3.0", is_seeded=True),
    "harbor": EnvironmentFacts(is_replayable=True, starts_programs=True),
}
"""By the KIND of `--env KIND:NAME`."""
