"""Checks of the user's own functions before a run.

They are the loss, advantages, filter, rates, callback and rule of branching.
"""

import os
import sys
from contextlib import closing

import numpy as np

from agentrl.algorithms.function_trial import try_functions
from agentrl.config.own_function import is_reference
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.errors import AgentWorkerError, ConfigError, UserCodeError
from agentrl.rollout.branch_rules import BranchingGroup, choose_branch
from agentrl.runtime.processes.request_process import RequestProcess
from agentrl.schema import DispatchedSamplingTask, Record, SamplingParams, Score, VersionSpan

_TRIAL = "agentrl.trainer.learner.loss_trial"
_TRIAL_SECONDS = 300.0


def check_functions(config: RootConfig) -> None:
    """Try each function on a small random step; see docs/own-algorithm.md.

    Raises:
        ConfigError: one cannot be used; names the flag and the remedy.
    """
    try_functions(config.algorithm, config.trainer)
    if is_reference(config.rollout.branch_rule):
        _try_branch_rule(config.rollout.branch_rule)
    if is_reference(config.algorithm.loss_calculator):
        _try_loss_elsewhere(config.algorithm)


def _try_branch_rule(reference: str) -> None:
    """Ask the rule for each slot of a round, in a group of three rollouts of three turns."""
    records = tuple(
        Record(
            id=f"train/0/trial/{number}",
            task_id="train/0/trial",
            split="train",
            traj_id=number,
            order=0,
            status="scored",
            attempt=1,
            outcome="answered",
            score=Score(scorer="exact", value=float(number == 0)),
        )
        for number in range(3)
    )
    turns = {record.id: [_trial_turn(record, index) for index in range(3)] for record in records}
    try:
        for position in range(3):
            choose_branch(
                reference,
                BranchingGroup(
                    records=records,
                    turns=turns,
                    round=1,
                    position=position,
                    depth=3,
                    seed=f"trial/{position}",
                    round_seed="trial",
                ),
            )
    except UserCodeError as error:
        raise ConfigError(str(error)) from error


def _trial_turn(record: Record, index: int) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=f"{record.id}/1/{index}",
        record_id=record.id,
        task_id=record.task_id,
        attempt=1,
        index=index,
        parent=index - 1 if index else None,
        shared_len=6 * index,
        added_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(3, dtype=np.int32),
        output_logprobs=np.full(3, -0.5, dtype=np.float32),
        version_spans=(VersionSpan(version=0, start=0, end=3),),
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )


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
