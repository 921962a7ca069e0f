"""Reads the groups of an optimizer step from the ledger as they become ready.

Input: finished groups from the store, each reserved or dropped on reading. Output: `StepGroups` for
the training loop. The reader also advances the samplers' admission bound as groups are consumed.
Independent of the model's weights and the servers.

An image is read once, however many records and steps show it; the processor settings stored with
the turns determine its form.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import SelectedGroup, select_group
from agentrl.data.shown_images import ImageBook, ShownImage, processor_key
from agentrl.datasets.task_feed import TaskFeed
from agentrl.errors import ImageError, StoreError, TrainingError
from agentrl.models.load import read_config
from agentrl.models.vision.image_encoders import reads_images
from agentrl.models.vision.image_reader import ImageReader
from agentrl.runtime.processes.signals import stopped_within
from agentrl.schema import (
    ENDED_RUNS,
    Control,
    DBRecordData,
    DispatchedSamplingTask,
    score_of,
)
from agentrl.schema.lost_versions import LostVersions, counted_in_steps
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.trainer.rl.sampling_lead import Admission, SamplingLead

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 30.0
_CONTROL_SECONDS = 1.0
_IMAGE_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ReadRecord:
    """What the figures of a step count of a record."""

    num_turns: int
    num_tokens: int
    num_sampled: int
    """Tokens that the policy sampled, copies in a branch included."""
    rule: str | None
    """What chose its turn in a later round of a tree; `none` if it started at the question."""

    @classmethod
    def of(cls, record: DBRecordData) -> Self:
        """Count a record."""
        rule = "none" if record.branch is None else record.branch.rule
        return cls(
            num_turns=len(record.turns),
            num_tokens=record.num_tokens,
            num_sampled=sum(len(turn.output_ids) for turn in record.turns if turn.trainable),
            rule=rule if record.round else None,
        )


@dataclass
class StepGroups:
    """The groups read for a step so far."""

    step: int
    turn_ids: Set[str] | None = None
    """The turns that may be trained on; None: all that are selected."""
    groups: list[SelectedGroup] = field(default_factory=list)
    """All groups of the step in reading order, including unusable ones."""
    records: list[ReadRecord] = field(default_factory=list)
    """Of the groups."""
    ages: list[int | None] = field(default_factory=list)
    """How many policy versions each record to train lags behind the step's initial version, if known."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Records not trained on, by reason."""
    teacher_wait_seconds: float = 0.0
    """How long complete groups were at hand, and all of them waited for teachers."""
    waited_seconds: float = 0.0
    """How long the step waited for groups."""
    end: Literal["full", "data_ended", "stopped"] = "full"
    """Reason why reading ended."""

    @property
    def usable(self) -> list[SelectedGroup]:
        """The groups with turns to train on."""
        return [group for group in self.groups if group.usable]

    @property
    def num_unusable(self) -> int:
        """Groups that were dropped as a whole; samplers may replace them at once."""
        return sum(not group.usable for group in self.groups)

    @property
    def staleness(self) -> dict[int, int]:
        """Records to train by their age."""
        return dict(sorted(Counter(age for age in self.ages if age is not None).items()))


def image_reader(path: Path, model: ModelSection) -> ImageReader | None:
    """Return the image reader of the model in a directory; None if it reads text only."""
    config = read_config(path, trust_remote_code=model.trust_remote_code)
    return ImageReader(config, path) if reads_images(config) else None


class RecordImages:
    """Reads the images of records for one model.

    Args:
        store: holds the images.
        reader: of the model; None if it reads text only.
    """

    def __init__(self, store: TrajectoryStore, reader: ImageReader | None) -> None:
        self._store = store
        self._reader = reader
        self._cache: OrderedDict[tuple[str, str], ShownImage] = OrderedDict()

    async def book(self, turns: Iterable[DispatchedSamplingTask]) -> ImageBook:
        """Return the images that turns add; those that cannot be read are missing, and logged."""
        turn_of_image = {
            (address, processor_key(turn.image_processor)): turn
            for turn in turns
            for address in turn.added_images
        }
        if self._reader is None:
            if not turn_of_image:
                return ImageBook()
            record = next(iter(turn_of_image.values())).record_id
            raise TrainingError(
                f"record {record} shows images, but the model reads text only; train on questions "
                "and tools without images (max_images 0), or train a vision model"
            )
        found = {key: self._cache[key] for key in turn_of_image if key in self._cache}
        missing = [key for key in turn_of_image if key not in found]
        files = await self._store.images.get([address for address, _ in missing])
        for key, file in zip(missing, files, strict=True):
            turn = turn_of_image[key]
            try:
                shown = await asyncio.to_thread(self._reader.shown, file.data, turn.image_processor)
            except ImageError as error:
                logger.warning(
                    "%s is left out of training: image %s: %s", turn.record_id, key[0], error
                )
                continue
            found[key] = self._add_to_cache(key, shown)
        return ImageBook(found, self._reader.token_id)

    def _add_to_cache(self, key: tuple[str, str], shown: ShownImage) -> ShownImage:
        self._cache[key] = shown
        while sum(len(one.data) for one in self._cache.values()) > _IMAGE_CACHE_BYTES:
            self._cache.popitem(last=False)
        return shown


class TeacherWait:
    """How long the groups at hand have been waiting for teachers.

    Args:
        teachers: names of those that every group needs.
        max_seconds: longest wait.
    """

    def __init__(self, teachers: Sequence[str], max_seconds: float) -> None:
        self._teachers = teachers
        self._max_seconds = max_seconds
        self._started: float | None = None
        self._since: float | None = None
        self.missing: tuple[str, ...] = ()
        """The teachers that the groups of the last look wait for."""

    def is_taught(self, group: Sequence[DBRecordData]) -> bool:
        """Return whether all teachers have given their logprobs to a whole group."""
        return all(name in record.taught for record in group for name in self._teachers)

    def look(self, ready: Sequence[Sequence[DBRecordData]], num_consumable: int) -> float:
        """Note the complete groups, and return the seconds waited since the last look."""
        names = (name for group in ready for record in group for name in self._missing(record))
        self.missing = () if num_consumable else tuple(sorted(set(names)))
        now, since = time.monotonic(), self._since
        if not self.missing:
            self._since = self._started = None
            return 0.0
        self._since = now
        if since is None or self._started is None:
            self._started = now
            return 0.0
        if now - self._started > self._max_seconds:
            name = self.missing[0]
            raise TrainingError(
                f"complete groups have waited {self._max_seconds:.0f} s for teacher {name}; start "
                f"`agentrl teach RUN --teacher {name}=MODEL` and resume the run, or raise "
                "teacher_wait_seconds"
            )
        return now - since

    def _missing(self, record: DBRecordData) -> list[str]:
        return [name for name in self._teachers if name not in record.taught]


class GroupReader:
    """Fills steps with groups, and admits samplers within the freshness bound."""

    def __init__(
        self,
        store: TrajectoryStore,
        images: RecordImages,
        *,
        algorithm: AlgorithmSection,
        trainer: TrainerSection,
        seed: int,
        more_may_come: bool,
        control: Control,
        feed: TaskFeed | None = None,
    ) -> None:
        """Start without an admission.

        Args:
            store: the run's store.
            images: reads the records' images.
            algorithm: filters and freshness.
            trainer: its ledger, its steps, and the scorer that it trains on.
            seed: seed of the filters that draw records.
            more_may_come: False if no sampler runs, so no further group becomes ready.
            control: initial size and freshness of the steps.
            feed: adds further tasks before samplers are admitted to them; None: all are there.
        """
        self._store = store
        self._images = images
        self._consumer = trainer.consumer
        self._algorithm = algorithm
        self._seed = seed
        self._max_steps = trainer.max_steps
        self._more_may_come = more_may_come
        self._scorer = trainer.trained_scorer
        self._feed = feed
        self.control = control
        """Size and freshness of the steps, which users may edit in the run's document at any time."""
        self.lost_versions: Sequence[LostVersions] = ()
        """Of the run; their records count as old as their weights are far away."""
        self._wait = TeacherWait(algorithm.teachers, algorithm.teacher_wait_seconds)
        self._lead = SamplingLead()
        self._admission: Admission | None = None
        self._admission_lock = asyncio.Lock()

    async def read_control(self) -> None:
        """Read the controls from the run's document."""
        run = await self._store.runs.get()
        if run is not None:
            self.control = run.control
            self.lost_versions = run.lost_versions

    async def follow_control(self) -> None:
        """Apply edits of the controls until cancelled, including during a step."""
        while True:
            await asyncio.sleep(_CONTROL_SECONDS)
            try:
                if await self._store.runs.audit_control():
                    logger.info("the run's controls were edited in the database")
                await self.read_control()
                admission = self._admission
                if admission is not None and self.control != admission.control:
                    await self.admit(admission.groups_consumed, admission.step)
            except StoreError as error:
                logger.warning(
                    "cannot read the run's controls, keeping the current ones: %s", error
                )

    async def admit(self, groups_consumed: int, step: int) -> None:
        """Admit groups for sampling up to the freshness bound.

        Running and finished-but-untrained groups stay within what the steps ahead, of those that
        remain, can consume.
        """
        if self._consumer != DEFAULT_CONSUMER:
            return  # a further consumer only reads; the leading trainer admits the samplers
        self._admission = Admission(groups_consumed, step, self.control, self._lead.groups)
        # `follow_control` may call concurrently. The bound is computed under the lock, so the last
        # write has the newest bound.
        async with self._admission_lock:
            bound = self._admission.bound(self._max_steps)
            await self._store.runs.set_admission(bound)
            if self._feed is not None:
                # One step ahead, so that tasks exist before samplers are admitted to them.
                await self._feed.fill(bound + self.control.groups_per_step)

    async def read_step(
        self, step: int, *, groups_consumed: int, stop: asyncio.Event
    ) -> StepGroups:
        """Read until the step has `groups_per_step` usable groups.

        Groups without signal and groups that are too old are dropped and replaced by others.

        Args:
            step: number of the optimizer step (from 1); the weights have version `step - 1`.
            groups_consumed: groups consumed by the steps before.
            stop: set when the process must stop.
        """
        collected = StepGroups(step)
        num_usable = 0
        reported_at = time.monotonic()
        while num_usable < (current := self.control).groups_per_step:
            algorithm = self._algorithm.under(current)
            # Queried before the groups are read: a group that completes in between then counts as
            # open, which only delays later groups. In the opposite order, they could overtake it.
            first_open = await self._first_open_order()
            ready = await self._store.ledger.ready_groups(
                self._consumer,
                limit=current.groups_per_step - num_usable,
                step=step,
            )
            complete, ready = ready, self._consumable(ready, first_open)
            collected.teacher_wait_seconds += self._wait.look(complete, len(ready))
            unusable_before = collected.num_unusable
            for records in ready:
                num_usable += await self._add_group(records, collected, algorithm)
            if collected.num_unusable > unusable_before:
                await self.admit(groups_consumed + collected.num_unusable, step)
            if ready:
                reported_at = time.monotonic()
                continue
            if await self._is_exhausted():
                collected.end = "data_ended"
                break
            if await stopped_within(stop, _POLL_SECONDS):
                collected.end = "stopped"
                break
            collected.waited_seconds += _POLL_SECONDS
            if time.monotonic() - reported_at > _REPORT_SECONDS:
                reported_at = time.monotonic()
                await self._report_wait(step, num_usable, current.groups_per_step)
        if collected.groups:
            await self._follow_lead(collected)
        return collected

    async def _follow_lead(self, read: StepGroups) -> None:
        """Let samplers run as far ahead, from the next admission on, as this step needed."""
        per_step = self.control.groups_per_step
        most = self.control.max_staleness
        if most:
            self._lead.note(
                num_taken=len(read.groups),
                num_left=await self._store.ledger.num_ready_groups(self._consumer),
                waited_seconds=read.waited_seconds,
                groups_per_step=per_step,
                most=most * per_step,
            )

    async def _first_open_order(self) -> int | None:
        if self._algorithm.staleness_policy == "drop":
            return None  # the order does not matter
        return await self._store.tasks.first_open_order()

    def _consumable(
        self, ready: Sequence[list[DBRecordData]], first_open: int | None
    ) -> list[list[DBRecordData]]:
        """Return the groups that may be consumed now.

        With `staleness_policy wait`, no group overtakes one that is still running. Admission runs
        no further ahead than samples stay fresh, so groups consumed in order never become stale. A group
        without the requested score, or without a teacher's logprobs, is skipped with `drop` and waited
        for with `wait`.
        """
        scored = [
            scored_by(self._scorer, group) if self._wait.is_taught(group) else None
            for group in ready
        ]
        if self._algorithm.staleness_policy == "drop":
            return [group for group in scored if group is not None]
        consumable: list[list[DBRecordData]] = []
        for group in scored:
            if group is None or (first_open is not None and group[0].order > first_open):
                break
            consumable.append(group)
        return consumable

    async def _add_group(
        self, records: Sequence[DBRecordData], collected: StepGroups, algorithm: AlgorithmSection
    ) -> bool:
        """Reserve the records that a group contributes to the step and drop its others.

        Returns:
            Whether the group has turns to train on.
        """
        version = collected.step - 1
        records = [counted_in_steps(record, self.lost_versions) for record in records]
        images = await self._images.book(turn for record in records for turn in record.turns)
        group = select_group(
            records, algorithm, policy_version=version, seed=self._seed, images=images
        )
        if (used := collected.turn_ids) is not None:
            group = replace(group, turns=tuple(one for one in group.turns if one.turn_id in used))
        kept = {turn.record_id for turn in group.turns}
        dropped = group.dropped_records
        if kept:
            await self._store.ledger.reserve(self._consumer, sorted(kept), collected.step)
        if dropped:
            await self._store.ledger.drop(self._consumer, sorted(dropped), collected.step, dropped)
        collected.groups.append(group)
        collected.dropped.update(dropped.values())
        oldest = [record.min_version for record in records if record.record_id in kept]
        collected.ages += [None if one is None else max(0, version - one) for one in oldest]
        collected.records += map(ReadRecord.of, records)
        return group.usable

    async def _is_exhausted(self) -> bool:
        if not self._more_may_come:
            return True
        if self._consumer != DEFAULT_CONSUMER:
            run = await self._store.runs.get()
            return run is not None and run.status in ENDED_RUNS
        return await self._store.ledger.is_exhausted()

    async def _report_wait(self, step: int, num_usable: int, groups_per_step: int) -> None:
        services = await self._store.services.all()
        samplers = await self._store.samplers.all(alive_within=_REPORT_SECONDS)
        logger.info(
            "step %d is waiting for samples: %d of %d groups; %d inference server(s) up, %d "
            "sampler(s)",
            step,
            num_usable,
            groups_per_step,
            sum(service.status == "up" for service in services),
            len(samplers),
        )
        if self._wait.missing:
            logger.info(
                "step %d: complete groups are waiting for teacher %s (`agentrl teach`)",
                step,
                ", ".join(self._wait.missing),
            )


def scored_by(scorer: str | None, records: Sequence[DBRecordData]) -> list[DBRecordData] | None:
    """Return records with the requested scorer's scores, or None while one is missing.

    Args:
        scorer: NAME or NAME@VERSION; None: the samplers' scores, unchanged.
        records: the records of one group.
    """
    if scorer is None:
        return list(records)
    name, _, version = scorer.partition("@")
    group = []
    for record in records:
        score = score_of((record.score, *record.more_scores), name, version or None)
        if score is None and record.score is not None:
            return None
        group.append(record.model_copy(update={"score": score}))
    return group
