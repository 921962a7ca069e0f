"""The files of questions before a run: can every question be asked and scored, and what is odd about them?

In goes the configuration, out come notes, or the first problem. Every line is read; nothing is written.
"""

import filecmp
from collections.abc import Iterator
from pathlib import Path

from agentrl.config.checks import groups_per_step
from agentrl.config.sections import DataSection, RootConfig
from agentrl.datasets.question import DEFAULT_SCORER
from agentrl.datasets.question_files import QuestionFile
from agentrl.environments import EnvironmentProcess, EnvironmentUri
from agentrl.errors import ConfigError
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import MCPScorerFactory, RegisteredScoring

_MAX_KEYS = 8
"""Keys that a note lists."""


def check_questions(
    config: RootConfig, renderer: Renderer | None = None, *, trains: bool
) -> list[str]:
    """Check the questions, and that each has a scorer that can judge it.

    Args:
        config: the checked configuration.
        renderer: of the model, where there is one.
        trains: whether the training questions are checked too.

    Returns:
        What a person should know before the run starts.

    Raises:
        ConfigError: a file, a question or a scorer cannot be used.
    """
    data, notes = config.data, list[str]()
    scoring = RegisteredScoring.load(config.rollout)
    _check_default_scorer(data)
    for path in (data.train_file if trains else None, data.eval_file):
        if path is None:
            continue
        with QuestionFile(path, data, MCPScorerFactory.check_question) as questions:
            for scorer in questions.scorers:
                scoring.check(scorer)
            if questions.has_images and renderer is not None:
                _check_images(config, path, renderer)
            notes += _oddities(config, path, questions)
    notes += _environment_notes(config, trains=trains)
    if trains and _are_equal(data.train_file, data.eval_file):
        notes.append(
            "--eval_file holds the training questions: its scores say nothing of questions that were "
            "not trained on"
        )
    return notes


def _check_default_scorer(data: DataSection) -> None:
    if data.default_scorer is None:
        return
    try:
        MCPScorerFactory.get_scorer(data.default_scorer)
    except ConfigError as error:
        raise ConfigError(f"--default_scorer: {error}") from None


def _environment_notes(config: RootConfig, *, trains: bool) -> Iterator[str]:
    for flag, uri in config.data.environments.items():
        if trains or flag != "env":
            num_tasks = _num_environment_tasks(uri, config.data, f"--{flag}")
            yield f"--{flag} {uri}: {num_tasks} tasks"
            yield from _steps_beyond(config, num_tasks) if flag == "env" else ()


def _oddities(config: RootConfig, path: Path, questions: QuestionFile) -> Iterator[str]:
    """Yield notes on the questions of a file."""
    if questions.unread_keys:
        keys = list(questions.unread_keys)
        more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
        yield f"nothing reads these keys of {path}: {', '.join(keys[:_MAX_KEYS])}{more}"
    if path == config.data.train_file:
        yield from _steps_beyond(config, len(questions))
    if config.data.default_scorer is None and questions.num_without_scorer:
        yield (
            f"{questions.num_without_scorer} question(s) of {path} name no scorer: `{DEFAULT_SCORER}` "
            "compares answers with the reference (--default_scorer)"
        )


def _steps_beyond(config: RootConfig, num_questions: int) -> list[str]:
    """Return a note where the questions end before the steps that were asked for."""
    num_groups = groups_per_step(config, config.trainer.num_processes)
    max_steps, epochs = config.trainer.max_steps, config.data.num_train_epochs
    num_steps = -(-num_questions * epochs // num_groups)
    if "max_steps" not in config.trainer.model_fields_set or num_steps >= max_steps:
        return []
    return [
        f"--max_steps {max_steps}: {num_questions} question(s) are at most {num_steps} step(s) of "
        f"{num_groups}; --num_train_epochs {-(-max_steps * num_groups // num_questions)} asks "
        "them more often"
    ]


def _num_environment_tasks(uri: str, data: DataSection, flag: str) -> int:
    with EnvironmentProcess(EnvironmentUri.parse(uri, flag), data, flag, quiet=True) as environment:
        return environment.size()


def _are_equal(train: Path | None, held_out: Path | None) -> bool:
    if train is None or held_out is None or not (train.is_file() and held_out.is_file()):
        return False
    return filecmp.cmp(train, held_out, shallow=False)


def _check_images(config: RootConfig, path: Path, renderer: Renderer) -> None:
    if not renderer.shows_images_of("user"):
        raise ConfigError(
            f"{path} has images, and the chat template of {config.model.model_name_or_path} "
            "shows none; take a vision model"
        )
    if not renderer.image_processor:
        raise ConfigError(
            f"{path} has images, and {config.model.model_name_or_path} has no "
            "preprocessor_config.json, which says how the model reads them"
        )
