"""One teacher at work: claims records, asks a server about them, and stores its logprobs.

What a server cannot answer now is asked again, for as long as it takes: a record has the teacher's
own numbers or none. Only a sequence that the server refuses for good is given up; its turns are then
left out of training, with a reason.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np

from agentrl.errors import InferenceError, ServerRefused, ServerUnreachable
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.teaching.lessons import TaughtSequence, lessons
from agentrl.inference.teaching.privileged_prompts import PrivilegedPrompts
from agentrl.runtime.ending_tasks import joint_tasks
from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.runtime.processes.signals import stopped_within
from agentrl.schema import ENDED_RUNS, DBRecordData
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""After this long, other processes teach what a dead one had claimed."""
_POLL_SECONDS = 0.5
_REPORT_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 15.0
_WRONG_SERVER = (401, 403, 404, 405)
"""Statuses that concern the server and its key rather than one request."""


@dataclass
class TeacherCounts:
    """Work done by a process so far."""

    num_records: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    """Sampled tokens with a logprob."""
    num_refused: int = 0
    """Sequences that the server refused for good."""
    num_without_prompt: int = 0
    """Records for which no prompt has all its values."""


class TeacherLoop:
    """Teaches the records of a run until it ends."""

    def __init__(
        self,
        store: TrajectoryStore,
        client: SGLangClient,
        name: str,
        *,
        prompts: PrivilegedPrompts,
        concurrency: int,
        exit_when_taught: bool,
        restarts_server: bool = False,
    ) -> None:
        """Claim nothing yet."""
        self._store = store
        self._client = client
        self._name = name
        self._prompts = prompts
        self._exit_when_taught = exit_when_taught
        self._restarts_server = restarts_server
        self._concurrency = concurrency
        self._owner = new_lease_owner()
        self._jobs: dict[asyncio.Task[None], str] = {}
        self._noticed_at = -_REPORT_SECONDS
        self.counts = TeacherCounts()

    async def run(self, stop: asyncio.Event) -> None:
        """Teach until nothing is left and the run has ended, or until `stop` is set."""
        try:
            async with joint_tasks() as group:
                chores = [group.create_task(one()) for one in (self._renew, self._report)]
                while not stop.is_set():
                    claimed = await self._claim()
                    if claimed is not None:
                        job = group.create_task(self._teach(claimed))
                        self._jobs[job] = claimed.record_id
                        job.add_done_callback(self._forget)
                    elif not self._jobs and await self._is_over():
                        break
                    else:
                        await self._pause(stop)
                for task in (*chores, *self._jobs):
                    task.cancel()
        finally:
            await self._store.teaching.release(self._name, self._owner)

    async def _claim(self) -> DBRecordData | None:
        if len(self._jobs) >= self._concurrency:
            return None
        return await self._store.teaching.claim(self._name, self._owner, LEASE_SECONDS)

    async def _pause(self, stop: asyncio.Event) -> None:
        """Wait for work: until a record ends if there is no room, else a moment."""
        stopped = asyncio.create_task(stopped_within(stop, _POLL_SECONDS))
        is_full = len(self._jobs) >= self._concurrency
        jobs = self._jobs if is_full else ()
        await asyncio.wait([stopped, *jobs], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _is_over(self) -> bool:
        if not self._exit_when_taught:
            run = await self._store.runs.get()
            if run is None or run.status not in ENDED_RUNS:
                return False
        return await self._store.teaching.num_untaught(self._name) == 0

    def _forget(self, job: asyncio.Task[None]) -> None:
        del self._jobs[job]

    async def _teach(self, record: DBRecordData) -> None:
        given: dict[str, np.ndarray] = {}
        prompt_ids = await self._prompts.ids_for(record)
        if prompt_ids is None:
            self.counts.num_without_prompt += 1
        else:
            for lesson in lessons(record.turns):
                given |= await self._answer(lesson, record.record_id, prompt_ids)
        await self._store.teaching.store(self._name, record.record_id, given)
        self.counts.num_records += 1
        self.counts.num_turns += len(given)
        self.counts.num_tokens += sum(map(len, given.values()))

    async def _answer(
        self, lesson: TaughtSequence, record_id: str, prompt_ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the logprobs of the turns of a lesson; none if the server never answers it."""
        ids = np.concatenate([prompt_ids, lesson.ids])
        start = len(prompt_ids) + lesson.start
        pause = 0.25
        while True:
            try:
                return lesson.by_turn(await self._client.prompt_logprobs(ids, start))
            except ServerRefused as error:
                if error.status in _WRONG_SERVER:
                    raise
                if not error.is_transient:
                    self.counts.num_refused += 1
                    logger.warning(
                        "%s: %d turn(s) have no logprobs of teacher %s and are left out of training: "
                        "%s",
                        record_id,
                        len(lesson.places),
                        self._name,
                        error,
                    )
                    return {}
                self._notice(error)
            except ServerUnreachable as error:
                if self._restarts_server:
                    raise
                self._notice(error)
            except InferenceError as error:
                self._notice(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _notice(self, error: InferenceError) -> None:
        now = time.monotonic()
        if now - self._noticed_at >= _REPORT_SECONDS:
            self._noticed_at = now
            logger.warning("teacher %s has no answer yet, asking again: %s", self._name, error)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            await self._store.teaching.renew(
                self._name, self._owner, [*self._jobs.values()], LEASE_SECONDS
            )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            logger.info(
                "teacher %s: %d records (%d without a prompt), %d tokens; %d records wait",
                self._name,
                self.counts.num_records,
                self.counts.num_without_prompt,
                self.counts.num_tokens,
                await self._store.teaching.num_untaught(self._name),
            )
