"""Checks of the user's own functions before a run: loss, advantages, filter, rates and callback."""

import os
import sys
from contextlib import closing

from agentrl.algorithms.function_trial import try_functions
from agentrl.config.own_function import is_reference
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.errors import AgentWorkerError, ConfigError
from agentrl.runtime.processes.request_process import RequestProcess

_TRIAL = "agentrl.trainer.learner.loss_trial"
_TRIAL_SECONDS = 300.0


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
    argv = [sys.executable, "-P", "-m", _TRIAL]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    with closing(RequestProcess("the trial of the loss", argv, environment)) as trial:
        try:
            found = trial.ask_and_wait(algorithm.model_dump(mode="json"), _TRIAL_SECONDS)
        except TimeoutError:
            raise ConfigError(
                f"{where}: its trial on 24 tokens took more than {_TRIAL_SECONDS:.0f} s; does it wait "
                "for something?"
            ) from None
        except AgentWorkerError:
            raise ConfigError(
                f"{where}: its trial ended with status {trial.exit_status}; the function must return"
            ) from None
    if found["problem"] is not None:
        raise ConfigError(found["problem"])
