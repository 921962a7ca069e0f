"""Loops of the user's own over the steps of a run: `agentrl.open_run`."""

from agentrl.plugins.own_loops.loop_process import open_run

__all__ = ["open_run"]
