"""Checks of question files before a run: every question must be usable and have a scorer.

Input: the configuration. Output: notes, or the first problem. Every line is read; nothing is
written.
"""

import filecmp
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from agentrl.config.sections import DataSection, RolloutSection, RootConfig
from agentrl.config.validation.checks import groups_per_step
from agentrl.datasets.entries import folder_of, read_entries
from agentrl.datasets.question import DEFAULT_SCORER, question_of
from agentrl.datasets.question_files import QuestionFile
from agentrl.datasets.task_source import generated_tasks, task_source
from agentrl.datasets.task_stream import check_known_questions, tasks_from_questions
from agentrl.errors import ConfigError
from agentrl.launcher.checks.policy_checks import find_model
from agentrl.launcher.checks.scorer_trial import try_scorers
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import MCPScorerFactory, RegisteredScoring
from agentrl.rewards.factory import ScoringFunction, load_scorer_module
from agentrl.rollout import sampler_class_for
from agentrl.rollout.worker.branching import check_can_branch, check_scorer_of_trees
from agentrl.rollout.worker.resources import is_resumable, served_context_length, tools_config
from agentrl.runtime.printable import counted
from agentrl.schema import MCPTask, Task
from agentrl.schema.answer_form import written
from agentrl.store import TrajectoryStore
from agentrl.tools.servers.served_question import ServedQuestion

_MAX_KEYS = 8
"""Maximum number of keys in a note."""
_MAX_COMPARED = 2000
"""Number of a file's questions that are compared with those of a resumed run."""


async def check_questions(
    config: RootConfig, renderer: Renderer | None = None, *, trains: bool
) -> list[str]:
    """Check the questions, and that each has a scorer."""
    data, notes = config.data, list[str]()
    before = MCPScorerFactory.registered_functions()
    scoring = RegisteredScoring.load(config.rollout)
    notes += _scorer_notes(config.rollout, before)
    _check_named_scorers(data)
    if trains:
        _check_environment_can_branch(data, scoring)
    if data.env_scorer is not None:
        scoring.check(data.env_scorer)
    for path in dict.fromkeys((data.train_file if trains else None, data.eval_file)):
        if path is None:
            continue
        with QuestionFile(path, data, MCPScorerFactory.check_question) as questions:
            for scorer in questions.scorers:
                scoring.check(scorer)
                if data.rounds and path == data.train_file:
                    check_scorer_of_trees(scoring, scorer)
            _check_servers_are_told(config, path, questions)
            if questions.has_images and renderer is not None:
                _check_images(config, path, renderer)
            if renderer is not None:
                notes += _long_questions(config, path, questions, renderer)
            notes += _file_notes(config, path, questions)
            notes += await try_scorers(config, path, questions)
    notes += _environment_notes(config, trains=trains)
    if trains:
        _check_generated_tasks(config)
        notes += _eval_notes(data)
    return notes


async def check_unchanged(data: DataSection, store: TrajectoryStore) -> list[str]:
    """Reject a question file whose questions have changed since the run read it.

    Only the first questions are compared, to report a change before anything starts; the trainer
    compares all.
    """
    if data.train_file is None or await store.tasks.next_train_order() == 0:
        return []
    folder = folder_of(data.train_file)
    entries = islice(read_entries(data.train_file), _MAX_COMPARED)
    first = [question_of(entry, data, where, folder) for where, entry in entries]
    tasks = list(tasks_from_questions(first, "train"))
    await check_known_questions(store, tasks)
    stored = {task.id: task for task in await store.tasks.get_many([task.id for task in tasks])}
    changed = [
        task.dataset_id
        for task in tasks
        if task.id in stored and _answers_differ(task, stored[task.id])
    ]
    if not changed:
        return []
    return [
        f"{data.train_file}: {counted(len(changed), 'answer')} changed, the first that of "
        f"{changed[0]!r}; the run keeps those that it read, so use another --run_name for the new ones"
    ]


def _answers_differ(task: Task, stored: Task) -> bool:
    if not (isinstance(task, MCPTask) and isinstance(stored, MCPTask)):
        return False
    return (task.answer, [*task.aug_answers]) != (stored.answer, [*stored.aug_answers])


def _check_servers_are_told(config: RootConfig, path: Path, questions: QuestionFile) -> None:
    """Check that every question has the columns and the fixtures that tool servers name."""
    for name, server in tools_config(config.tools).selected.items():
        lacking = [
            one for one in server.named_columns if one not in (questions.common_columns or ())
        ]
        if lacking:
            common = ", ".join(sorted(questions.common_columns or ())) or "none"
            raise ConfigError(
                f"mcpServers.{name} needs the column {lacking[0]!r}, which not every question of "
                f"{path} has (own columns of all questions: {common})"
            )
        if server.fixture:
            folder = folder_of(path)
            for one in questions:
                ServedQuestion(one.id, "", one.columns, folder).check_fixture(server.fixture)


def _scorer_notes(rollout: RolloutSection, before: Sequence[ScoringFunction]) -> Iterator[str]:
    """Yield a note if the user's scorer module registers no scorer."""
    if rollout.scorer_module is None:
        return
    registered = MCPScorerFactory.registered_functions()
    module = load_scorer_module(rollout.scorer_module)
    # A module that was already imported has already registered its scorers.
    has_scorer = any(
        getattr(function, "__module__", "") == module.__name__ for function in registered
    )
    if len(registered) == len(before) and not has_scorer:
        yield (
            f"--scorer_module {rollout.scorer_module} registers no scorer; decorate its function "
            'with @MCPScorerFactory.register_scorer("NAME")'
        )


def _check_named_scorers(data: DataSection) -> None:
    names = {"default_scorer": data.default_scorer, "env_scorer": data.env_scorer}
    for flag, name in names.items():
        try:
            sees_group = name is not None and MCPScorerFactory.get_scorer(name).sees_group
        except ConfigError as error:
            raise ConfigError(f"--{flag}: {error}") from None
        if flag == "env_scorer" and name is not None and not sees_group:
            raise ConfigError(
                f"--env_scorer {name}: it scores single answers, which environments reward "
                "themselves; choose a scorer registered with sees_group=True"
            )


def _check_generated_tasks(config: RootConfig) -> None:
    data = config.data
    if data.sampler_module is None:
        return
    task = next(generated_tasks(data, config.run.seed), None)
    if data.rounds:
        sampled = task or MCPTask(id="", query="")
        resumable = is_resumable(config, tools_config(config.tools))
        check_can_branch(sampler_class_for(sampled), is_resumable=resumable)
    if task is not None:
        sampler_class_for(task)
    elif data.train_file is None and data.env is None:
        raise ConfigError(
            f"--sampler_module {data.sampler_module}: its train_tasks(seed) yields no task; add "
            "one, or give --train_file"
        )


def _check_environment_can_branch(data: DataSection, scoring: RegisteredScoring) -> None:
    if data.env is None or not data.rounds:
        return
    if not task_source(data.env).can_branch(data.env, "--env"):
        raise ConfigError(
            f"--rollouts tree: environment {data.env} offers no snapshots and is not known to answer the "
            "same replies in the same way, so no rollout could start at a turn of another; if it "
            "does, add replayable=true to its parameters, or else give --rollouts chains"
        )
    if data.env_scorer is not None:
        check_scorer_of_trees(scoring, data.env_scorer)


def _eval_notes(data: DataSection) -> Iterator[str]:
    if _are_equal(data.train_file, data.eval_file):
        yield (
            "--eval_file holds the training questions: its scores do not measure generalization to "
            "other questions"
        )


def _environment_notes(config: RootConfig, *, trains: bool) -> Iterator[str]:
    for flag, uri in config.data.environments.items():
        if trains or flag != "env":
            num_tasks = task_source(uri, f"--{flag}").num_tasks(uri, config.data, f"--{flag}")
            yield f"--{flag} {uri}: {counted(num_tasks, 'task')}"
            yield from _steps_beyond(config, num_tasks) if flag == "env" else ()


def _file_notes(config: RootConfig, path: Path, questions: QuestionFile) -> Iterator[str]:
    """Yield notes on the questions of a file."""
    if questions.unread_keys:
        yield (
            f"own columns of {path}: {_listed(questions.unread_keys)} (`truth.columns` in scorers, "
            "`task.columns` in agents, `${row.NAME}` in tool servers)"
        )
    if questions.columns_left_out:
        yield (
            f"{path}: columns that are longer than 100,000 characters or no JSON are not carried: "
            f"{_listed(questions.columns_left_out)}"
        )
    if path == config.data.train_file:
        yield from _steps_beyond(config, len(questions))
    for (asked, looked_for), (number, where) in questions.other_requests.items():
        yield (
            f"{path}: {counted(number, 'question')} (first: {where}) ask for {written(asked)}, and the "
            f"answer is looked for in {written(looked_for)}; leave out the answer schema, or change "
            "the text"
        )
    if config.data.default_scorer is None and questions.num_without_scorer:
        yield (
            f"{questions.num_without_scorer} question(s) of {path} name no scorer: "
            f"`{DEFAULT_SCORER}` compares their answers with the reference (change it with "
            "--default_scorer)"
        )


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _MAX_KEYS} more" if len(names) > _MAX_KEYS else ""
    return ", ".join([*names][:_MAX_KEYS]) + more


def _long_questions(
    config: RootConfig, path: Path, questions: QuestionFile, renderer: Renderer
) -> Iterator[str]:
    """Yield a note if a question alone exceeds the prompt limit."""
    max_tokens = config.sampling.max_prompt_tokens
    model_dir = find_model(config.model, with_weights=False)
    context_length = served_context_length(config.inference, model_dir)
    if context_length is not None:
        max_tokens = min(max_tokens, context_length - 1)
    shortest, longest = (
        len(renderer.encode(_as_stored(question.system_prompt + question.query)))
        for question in questions.extremes
    )
    limits = (
        f"the limit of a prompt is {max_tokens} (--max_prompt_tokens, --context_length, the model's "
        "limit)"
    )
    if shortest >= max_tokens:
        raise ConfigError(f"{path}: every question has {shortest} tokens or more, and {limits}")
    if longest >= max_tokens:
        yield (
            f"{path}: a question has {longest} tokens, and {limits}: its rollouts end without an "
            "answer"
        )


def _as_stored(text: str) -> str:
    """Return a text as the store keeps it, with lone surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _steps_beyond(config: RootConfig, num_questions: int) -> list[str]:
    """Return a note if the questions run out before the requested number of steps."""
    num_groups = groups_per_step(config, config.trainer.num_processes)
    max_steps, epochs = config.trainer.max_steps, config.data.num_train_epochs
    num_steps = -(-num_questions * epochs // num_groups)
    if "max_steps" not in config.trainer.model_fields_set or num_steps >= max_steps:
        return []
    return [
        f"--max_steps {max_steps}: {num_questions} question(s) last for at most {num_steps} "
        f"step(s) of {num_groups}; repeat them with --num_train_epochs "
        f"{-(-max_steps * num_groups // num_questions)}"
    ]


def _are_equal(train: Path | None, held_out: Path | None) -> bool:
    if train is None or held_out is None or not (train.is_file() and held_out.is_file()):
        return False
    return filecmp.cmp(train, held_out, shallow=False)


def _check_images(config: RootConfig, path: Path, renderer: Renderer) -> None:
    if not renderer.shows_images_of("user"):
        raise ConfigError(
            f"{path} has images, and the chat template of {config.model.model_name_or_path} does "
            "not support any; use a vision model"
        )
    if not renderer.image_processor:
        raise ConfigError(
            f"{path} has images, and {config.model.model_name_or_path} has no "
            "preprocessor_config.json, which is required to prepare images"
        )
