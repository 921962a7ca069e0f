"""`--sampler_module`: tasks of a user's own kind, from a Python file that registers kinds and samplers."""

from collections.abc import Iterator
from types import ModuleType

from agentrl.config.sections import DataSection
from agentrl.config.user_code import load_user_module
from agentrl.errors import ConfigError
from agentrl.schema import Task

_FUNCTION = "train_tasks"


def load_sampler_module(config: DataSection) -> ModuleType | None:
    """Import the file that registers kinds of tasks, so that the store can read them.

    Raises:
        ConfigError: it is missing or fails on import.
    """
    source = config.sampler_module
    return None if source is None else load_user_module(source, f"--sampler_module {source}")


def generated_tasks(config: DataSection, seed: int) -> Iterator[Task]:
    """Import `--sampler_module` immediately, and yield its training tasks, if any.

    Raises:
        ConfigError: the file cannot be used; from the iterator: a yielded value is not a task.
    """
    return _tasks_of(load_sampler_module(config), config, seed)


def _tasks_of(module: ModuleType | None, config: DataSection, seed: int) -> Iterator[Task]:
    generator = getattr(module, _FUNCTION, None)
    if generator is None:
        return
    what = f"--sampler_module {config.sampler_module}: {_FUNCTION}"
    for task in _call_generator(generator, seed, what):
        if not isinstance(task, Task):
            raise ConfigError(f"{what} yielded a {type(task).__name__}, not a task")
        fields: dict[str, object] = {"split": "train"}
        if "num_generations" not in task.model_fields_set:
            fields["num_generations"] = config.num_generations
            fields["rounds"] = config.rounds
        yield task.model_copy(update=fields)


def _call_generator(generator: object, seed: int, what: str) -> Iterator[object]:
    try:
        yield from generator(seed)  # type: ignore[operator]
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error
