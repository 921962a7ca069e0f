"""Checks of the user's own functions before a run: loss, advantages, filter, rates and callback."""

import json
import os
import subprocess
import sys

from agentrl.algorithms.function_trial import try_functions
from agentrl.config.own_function import is_reference
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.errors import ConfigError

_TRIAL = "agentrl.trainer.learner.loss_trial"
_TRIAL_SECONDS = 300


def check_functions(config: RootConfig) -> None:
    """Try each function on a small random step; see docs/own-algorithm.md.

    Raises:
        ConfigError: one cannot be used; names the flag and the remedy.
    """
    try_functions(config.algorithm, config.trainer)
    if is_reference(config.algorithm.loss_calculator):
        _try_loss_elsewhere(config.algorithm)


def _try_loss_elsewhere(algorithm: AlgorithmSection) -> None:
    """Try the loss in a process of its own, because the launcher never imports torch."""
    where = f"--loss_calculator {algorithm.loss_calculator}"
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", _TRIAL],
            input=algorithm.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_TRIAL_SECONDS,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{where}: its trial on 24 tokens took more than {_TRIAL_SECONDS} s; does it wait for "
            "something?"
        ) from None
    if ended.returncode or not ended.stdout:
        last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            f"{where}: its trial ended with status {ended.returncode}: {last[0]}; the function must "
            "return"
        )
    problem = json.loads(ended.stdout)["problem"]
    if problem is not None:
        raise ConfigError(problem)
