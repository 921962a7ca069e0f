"""Turns of an earlier run as tasks: `--env stored:RUN` starts rollouts where its scores part."""
