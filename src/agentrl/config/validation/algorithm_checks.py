"""Checks of the objective: ignored settings, invalid importance ratios, the age of samples.

Input: sections whose values are individually valid. Output: the problems, one per line.
"""

from collections.abc import Iterator

from agentrl.config.own_function import is_reference
from agentrl.config.sections import (
    AlgorithmSection,
    RootConfig,
    SamplingSection,
    TrainerSection,
)
from agentrl.errors import ConfigError
from agentrl.schema.formulas import OPD

READ_BY = {
    "beta1": ("GRPO",),
    "beta2": ("GRPO",),
    "dual_clip": ("GRPO", "GSPO"),
    "importance_weight_truncation": ("MINIRL",),
    "strict_in_bound": ("GRPO", "MINIRL"),
    "out_of_date_decay": ("GRPO", "MINIRL"),
    "importance_weight_cap_ratio": ("GRPO", "MINIRL"),
}
"""Flag -> losses that it changes; the others would silently ignore it."""
_OF_WHOLE_TURNS = ("minimal_advantage", "skip_non_positive_advantage")
"""Filters by the one advantage of a turn."""
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Flag -> the value that changes nothing."""


def loss_contradictions(algorithm: AlgorithmSection) -> Iterator[str]:
    """Yield problems in the settings of the loss and its corrections."""
    if algorithm.loss_normalizer_length is not None and (
        algorithm.token_level_loss or not algorithm.skip_length_normalization
    ):
        yield (
            "--loss_normalizer_length requires --token_level_loss false and "
            "--skip_length_normalization true"
        )
    yield from _settings_without_effect(algorithm)


def teacher_contradictions(config: RootConfig) -> Iterator[str]:
    """Yield problems in the flags of teachers."""
    algorithm = config.algorithm
    share = algorithm.teacher_share
    flag = (
        "--advantage_estimator opd" if algorithm.advantage_estimator == OPD else "--teacher_weight"
    )
    if algorithm.advantage_estimator == OPD and algorithm.teacher_weight not in (0.0, 1.0):
        yield (
            "--advantage_estimator opd has no rewards to mix with; choose another estimator next to "
            f"--teacher_weight {algorithm.teacher_weight}"
        )
    if len(set(algorithm.teachers)) < len(algorithm.teachers):
        yield f"--teachers {','.join(algorithm.teachers)}: a name is given twice"
    if not share:
        return
    if not algorithm.teachers:
        yield f"{flag} needs teachers; give --teachers NAME (see docs/teachers.md)"
    if config.sampling.temperature != 1:
        yield (
            f"{flag} compares with teachers at temperature 1, not --temperature "
            f"{config.sampling.temperature}; remove it"
        )
    for name in _OF_WHOLE_TURNS:
        value = getattr(algorithm, name)
        if value is not None and value is not False:  # a bound of 0 is one, too
            yield f"--{name} is for one advantage a turn; {flag} gives each token its own"
    if algorithm.advantage_estimator == "reinforce_plus_plus":
        yield f"reinforce_plus_plus normalizes one advantage a turn; {flag} gives each token its own"


def schedule_contradictions(trainer: TrainerSection) -> Iterator[str]:
    """Yield a flag of the learning rate that a user's own schedule replaces."""
    if is_reference(trainer.lr_scheduler_type) and trainer.warmup_steps:
        yield (
            f"--lr_scheduler_type {trainer.lr_scheduler_type} replaces --warmup_steps "
            f"{trainer.warmup_steps}; remove it, and warm up in your function"
        )


def _settings_without_effect(algorithm: AlgorithmSection) -> Iterator[str]:
    if algorithm.loss_args and not is_reference(algorithm.loss_calculator):
        yield (
            f"--loss_args are arguments of your own loss, and {algorithm.loss_calculator} is built "
            "in; give --loss_calculator file.py:name"
        )
    for name, losses in () if is_reference(algorithm.loss_calculator) else READ_BY.items():
        value = getattr(algorithm, name)
        is_set = bool(value) and value != type(algorithm).model_fields[name].default
        if is_set and algorithm.loss_calculator not in losses:
            yield (
                f"--{name} is a setting of {' and '.join(losses)}, and {algorithm.loss_calculator} "
                "ignores it; remove it"
            )


def check_training(config: RootConfig) -> None:
    """Refuse what no trainer can learn from; a trainer that is started by hand checks it itself."""
    data, trainer = config.data, config.trainer
    _check_sampling(config.sampling)
    if data.has_training and data.num_generations == 1:
        raise ConfigError(
            "--num_generations 1: a rollout is compared with the other rollouts of its question, "
            "so a single one teaches nothing; use 2 or more"
        )
    if trainer.consumer == type(trainer).model_fields["consumer"].default:
        return
    if config.run.output_dir is None:
        raise ConfigError(f"--consumer {trainer.consumer} needs a separate --output_dir")
    if trainer.eval_strategy != "no":
        raise ConfigError(
            f"--consumer {trainer.consumer} publishes no weights, so the run's servers cannot "
            "evaluate them; use --eval_strategy no, and `agentrl eval` later"
        )


def _check_sampling(sampling: SamplingSection) -> None:
    """Refuse greedy sampling, and penalties on repeated tokens, in rollouts that are trained on.

    Greedy rollouts are identical and carry no learning signal. Servers report logprobs after
    penalties, which depend on all previous tokens, while the trainer's logprobs are those of the
    policy itself: every importance ratio would be wrong from the first step, and some tokens would
    be clipped.
    """
    if sampling.temperature == 0:
        raise ConfigError(
            "--temperature 0: all rollouts of a question would be identical and nothing could be "
            "learned; use a higher temperature (evaluations have their own, --eval_temperature)"
        )
    for name, neutral in _PENALTIES.items():
        value = getattr(sampling, name)
        if value != neutral:
            raise ConfigError(
                f"--{name} {value:g} changes the servers' logprobs but not the trainer's, which "
                f"makes importance ratios wrong; train with {neutral:g}, and use it only with "
                "`agentrl eval`"
            )
