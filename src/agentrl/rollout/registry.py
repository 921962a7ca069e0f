"""Which sampler class runs which kind of task; a user's classes register themselves here."""

from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.rollout.mcp_sampler import MCPSampler
from agentrl.schema import MCPTask, Task

SamplerClass = type[AsyncSampler[Any]]
_Class = TypeVar("_Class", bound=SamplerClass)

_SAMPLERS: dict[type[Task], SamplerClass] = {MCPTask: MCPSampler}


def register_sampler(task_class: type[Task]) -> Callable[[_Class], _Class]:
    """Run tasks of `task_class` and its subclasses with the decorated sampler class."""

    def register(sampler_class: _Class) -> _Class:
        _SAMPLERS[task_class] = sampler_class
        return sampler_class

    return register


def sampler_class_for(task: Task) -> SamplerClass:
    """Return the sampler class registered for the nearest of the task's classes.

    Raises:
        ConfigError: no sampler is registered for this kind of task.
    """
    for cls in type(task).__mro__:
        if cls in _SAMPLERS:
            return _SAMPLERS[cls]
    raise ConfigError(
        f"task {task.id} is of kind {task.kind!r}, for which no sampler is registered "
        "(use agentrl.rollout.register_sampler)"
    )
