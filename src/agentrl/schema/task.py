"""`Task`: one question with `num_generations` rollouts, its `Record`s."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field

from agentrl.schema.base import Value, utc_now
from agentrl.schema.score import Score
from agentrl.schema.stored_start import StoredStart

Split = Literal["train", "eval", "test", "valid"]
TaskStatus = Literal["created", "completed"]


def id_of_task(split: str, epoch: int, question_id: str) -> str:
    """Return the id of a question's task in an epoch, or of its evaluation at a policy version."""
    return f"{split}/{epoch}/{question_id}"


class Task(Value):
    """A question with `num_generations` rollouts, which form a group.

    Subclass it for other kinds of task, set `kind` and register the class with
    `register_task_type`, so that the store can load documents of that kind.
    """

    kind: ClassVar[str] = "task"

    id: str
    """Unique in the run, for example `train/0/q17` (split / epoch / dataset id)."""
    split: Split = "train"
    epoch: int = 0
    order: int = 0
    """Position of the group in the run's stream; lower orders are claimed first. The store numbers
    training tasks as they are added. Evaluation tasks have negative orders, so that they precede them."""
    num_generations: int = 1
    rounds: tuple[int, ...] = ()
    """Rollouts of each round of a group that branches: `(4, 2, 2)`; empty: all start together."""
    description: str = ""
    status: TaskStatus = "created"
    tag: str = ""
    """Free label that groups results in reports; evaluations store their name here."""
    start: StoredStart | None = None
    """The turn of an earlier run where its rollouts start; None: at the question."""
    group_scores: dict[str, Score] = Field(default_factory=dict)
    """Decisions of a scorer that sees the whole group, by `traj_id`; the Records copy their own."""
    created_at: datetime = Field(default_factory=utc_now)
    completed_at: datetime | None = None

    def again(self, task_id: str, **changes: Any) -> Self:
        """Return a task that asks the same once more, without results."""
        new: dict[str, Any] = {
            "id": task_id,
            "status": "created",
            "completed_at": None,
            "group_scores": {},
        }
        return self.model_copy(update={**new, **changes})


class MCPTask(Task):
    """A question answered with MCP tools and scored by a scorer."""

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
    """Labels of the question in its dataset; evaluations report each on a separate line."""
    images: tuple[str, ...] = ()
    """Images shown before the question: http(s) or `data:` URLs (stored once, when the task is
    added), or addresses of stored images."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """Columns of its row in the dataset that are no field above: for scorers, agents, and the tool
    servers that ask for them (`${row.NAME}`)."""


class EnvironmentTask(MCPTask):
    """A task of an environment, which runs and rewards it (`agentrl run --env KIND:NAME`)."""

    kind: ClassVar[str] = "environment"

    env_id: str
    """`KIND:NAME`, as in `reasoning_gym:leg_counting`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The environment's own arguments (size, seed, difficulty)."""
    row: int
    """Number of the task in the environment, from 0."""
    scorer: str = "reported"


_COMPARE = "compare the answer with truth.answer, not with the truth object"


class GroundTruth(Value, Mapping[str, Any]):
    """The question and the answers that count as right, as a scorer is given them.

    A mapping of its fields: `truth["answer"]` is `truth.answer`. `str(truth)` is the reference
    answer as text. Comparing the object itself raises an error: an answer never equals it, and
    every score would be 0.
    """

    query: str
    answer: Any = None
    """The reference answer; `0` and `False` are answers, None means there is none."""
    aug_answers: tuple[Any, ...] = ()
    """Further answers that count as right."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """The question's own columns (`MCPTask.columns`)."""

    @classmethod
    def of(cls, task: MCPTask) -> "GroundTruth":
        """Return the question and the right answers of a task."""
        return cls(
            query=task.query, answer=task.answer, aug_answers=task.aug_answers, columns=task.columns
        )

    @property
    def accepted(self) -> tuple[str, ...]:
        """All right answers as text; those that are not strings as JSON."""
        answers = (self.answer, *self.aug_answers)
        return tuple(_as_text(answer) for answer in answers if answer is not None)

    def __getitem__(self, name: str) -> Any:
        # The original AgentRL names the further answers in the singular.
        field = "aug_answers" if name == "aug_answer" else name
        if field not in type(self).model_fields:
            raise KeyError(f"{name!r} (a truth has {', '.join(type(self).model_fields)})")
        return getattr(self, field)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(type(self).model_fields)

    def __len__(self) -> int:
        return len(type(self).model_fields)

    def __str__(self) -> str:
        return "" if self.answer is None else _as_text(self.answer)

    def __contains__(self, name: object) -> bool:
        if name not in type(self).model_fields:
            raise TypeError(_COMPARE)
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GroundTruth):
            raise TypeError(_COMPARE)
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.query, str(self)))


def _as_text(answer: object) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # tables convert a column of integers with missing values to floats
    return json.dumps(answer, ensure_ascii=False)


TASK_TYPES: dict[str, type[Task]] = {cls.kind: cls for cls in (Task, MCPTask, EnvironmentTask)}
TaskClass = TypeVar("TaskClass", bound=type[Task])


def register_task_type(cls: TaskClass) -> TaskClass:
    """Make the store able to load tasks of this class (class decorator).

    Raises:
        ValueError: another class is already registered under the same `kind`.
    """
    known = TASK_TYPES.get(cls.kind)
    if known is not None and known is not cls:
        raise ValueError(f"task kind {cls.kind!r} is already registered by {known.__name__}")
    TASK_TYPES[cls.kind] = cls
    return cls
