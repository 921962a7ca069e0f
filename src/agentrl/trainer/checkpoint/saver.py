"""When checkpoints are written: at once, or beside training with `--async_save`."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.config.sections import TrainerSection
from agentrl.trainer.checkpoint.checkpoint import Draft
from agentrl.trainer.metrics.history import History
from agentrl.trainer.worker_group import Team


class Saver:
    """Writes a run's checkpoints, one after the other."""

    def __init__(
        self,
        output_path: Path,
        *,
        team: Team,
        trainer: TrainerSection,
        saved_step: int,
        on_saved: Callable[[int], Awaitable[None]],
    ) -> None:
        """Set up.

        Args:
            output_path: the run's output directory.
            team: the ranks, whose state is written.
            trainer: how and how many.
            saved_step: step of the newest checkpoint.
            on_saved: told the step of every checkpoint as soon as it is whole.
        """
        self._output_path = output_path
        self._team = team
        self._trainer = trainer
        self._on_saved = on_saved
        self._saving: asyncio.Task[None] | None = None
        self.saved_step = saved_step
        """Step of the newest whole checkpoint."""

    async def save(self, model_dir: Path, history: History) -> None:
        """Write a checkpoint; with `--async_save`, return when its content is set.

        Args:
            model_dir: Hugging Face directory of the weights after the last step.
            history: what the run did so far.

        Raises:
            WriteError: this one, or the one before it, could not be written.
        """
        await self.settle()
        draft = await asyncio.to_thread(
            Draft.begin,
            self._output_path,
            step=history.last_step,
            model_dir=model_dir,
            history=history,
        )
        in_background = self._trainer.async_save
        if not self._trainer.save_only_model:
            await self._team.save_state(draft.state_path, in_background=in_background)
        self._saving = asyncio.create_task(self._finish(draft))
        if not in_background:
            await self.settle()

    async def settle(self) -> None:
        """Return when the checkpoint that is being written, if there is one, is whole."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def give_up(self) -> None:
        """Leave the checkpoint that is being written as it is."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.wait([self._saving])

    async def _finish(self, draft: Draft) -> None:
        await self._team.wait_saved()
        await asyncio.to_thread(draft.finish, keep=self._trainer.save_total_limit)
        await self._on_saved(draft.step)
        self.saved_step = draft.step
