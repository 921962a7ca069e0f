"""What a teacher alone reads before a conversation: texts with values of the question and its group.

With a solved attempt or the scorer's feedback in it, the policy's own model is a teacher: SDPO,
self-distillation policy optimization (arXiv 2601.20802). A record for which no text has all its values
has no prompt, and the teacher gives it no logprobs.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers.renderer import Renderer
from agentrl.renderers.thinking import without_thinking
from agentrl.schema import TASK_TYPES, DBRecordData
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_PLACEHOLDER = re.compile(r"\{([a-z_]+)((?:\.\w+)*)\}")
_SOLUTION, _FEEDBACK = "solution", "feedback"


def check_placeholders(templates: Sequence[str]) -> None:
    """Refuse texts with a placeholder that no question fills."""
    of_tasks = {field for kind in TASK_TYPES.values() for field in kind.model_fields}
    known = [_SOLUTION, _FEEDBACK, *sorted(of_tasks)]
    for template in templates:
        for match in _PLACEHOLDER.finditer(template):
            if match[1] not in known:
                raise ConfigError(
                    f"--teacher_prompt: {match[0]} stands for nothing; known are {', '.join(known)}"
                )


class PrivilegedPrompts:
    """The prompts of one teacher."""

    def __init__(
        self,
        templates: Sequence[str],
        renderer: Renderer,
        store: TrajectoryStore,
        *,
        solution_score: float,
    ) -> None:
        """Read nothing yet."""
        self._templates = templates
        self._renderer = renderer
        self._store = store
        self._solution_score = solution_score

    async def ids_for(self, record: DBRecordData) -> np.ndarray | None:
        """Return the ids before the conversations of a record, int32 [N]; None without a prompt."""
        for template in self._templates:
            places = [match[0] for match in _PLACEHOLDER.finditer(template)]
            values = {place: await self._value(place[1:-1], record) for place in places}
            filled = {place: value for place, value in values.items() if value is not None}
            if len(filled) < len(values):
                continue
            try:
                return self._renderer.fill(template, filled)
            except RenderError as error:
                logger.warning(
                    "%s: no --teacher_prompt can be written: %s", record.record_id, error
                )
        return None

    async def _value(self, path: str, record: DBRecordData) -> str | None:
        """Return the text of a placeholder; None if there is none, or it is empty."""
        if path == _FEEDBACK:
            return (record.score.detail if record.score else "") or None
        if path == _SOLUTION:
            turns = await self._store.teaching.solution(record, self._solution_score)
            replies = (without_thinking(turn.output_text).strip() for turn in turns)
            return "\n\n".join(filter(None, replies)) or None
        task = await self._store.tasks.get(record.task_id)
        found: Any = {} if task is None else task.model_dump(mode="json")
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None or found in ("", [], {}):
            return None
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
