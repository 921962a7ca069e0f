"""`Task`: one question that is tried `num_generations` times. Its tries are `Record`s."""

from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from agentrl.schema.base import Value, utc_now

Split = Literal["train", "eval", "test", "valid"]
TaskStatus = Literal["created", "completed"]


class Task(Value):
    """A question to be tried `num_generations` times; the tries form a group.

    Subclass it for other kinds of task, set `kind` and register the class with
    `register_task_type`, so that the store can load documents of that kind.
    """

    kind: ClassVar[str] = "task"

    id: str
    """Unique in the run, for example `train/0/q17` (split / epoch / dataset id)."""
    split: Split = "train"
    epoch: int = 0
    order: int = 0
    """Position of the group in the run's stream; lower orders are claimed first. Evaluation tasks
    have negative orders, so that they precede training tasks."""
    num_generations: int = 1
    description: str = ""
    status: TaskStatus = "created"
    tag: str = ""
    """Free label by which results are grouped in reports; evaluations put their name here."""
    created_at: datetime = Field(default_factory=utc_now)
    completed_at: datetime | None = None


class MCPTask(Task):
    """A question answered with MCP tools and judged by a scorer."""

    kind: ClassVar[str] = "mcp"

    query: str
    """The user's message."""
    system_prompt: str = ""
    answer: Any = None
    """Reference answer. `0` and `False` are answers; None means there is none."""
    aug_answers: tuple[Any, ...] = ()
    """Further answers that count as right."""
    scorer: str = "agentcpm"
    answer_schema: str = "answer"
    """`boxed`, or the name of the tag that encloses the final answer."""
    dataset_id: str = ""
    """The id that the dataset gave the question."""
    tags: tuple[str, ...] = ()
    """Labels that the dataset gave the question; evaluations report each on a line of its own."""
    images: tuple[str, ...] = ()
    """Images shown before the question: http(s) or `data:` URLs (stored once, when the task is
    added), or addresses of stored images."""


TASK_TYPES: dict[str, type[Task]] = {Task.kind: Task, MCPTask.kind: MCPTask}
TaskClass = TypeVar("TaskClass", bound=type[Task])


def register_task_type(cls: TaskClass) -> TaskClass:
    """Make the store able to load tasks of this class (class decorator).

    Raises:
        ValueError: another class is already registered under the same `kind`.
    """
    known = TASK_TYPES.get(cls.kind)
    if known is not None and known is not cls:
        raise ValueError(f"task kind {cls.kind!r} is already taken by {known.__name__}")
    TASK_TYPES[cls.kind] = cls
    return cls
