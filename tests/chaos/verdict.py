"""What the chaos did to the run: the processes' own journals against the database."""

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.journal import read_journal
from chaos.sampler import digest
from support.stored import wrong_counts

from agentrl.errors import StoreError
from agentrl.schema import TERMINAL_STATUSES, DispatchedSamplingTask
from agentrl.store import TrajectoryStore

Event = dict[str, Any]
MUST_BE_ZERO = (
    *("lost_turns", "double_trained", "skipped", "incomplete_groups", "fencing_violations"),
    *("attempts_booked_wrongly", "trained_stale", "wrong_counts", "broken_branches"),
    *("expired_early", "wrong_resumes", "unclean_stops", "claims_under_bad_controls"),
    *("engine_failures", "broken_copies", "lost_scores"),
)
HOLDERS_OWN = frozenset({"sampler", "scorer", "stall", "launcher"})
"""Faults that take a lease from its holder, if they strike the holder."""
HARNESS_SECONDS = 0.5
"""What passes between a fault and its note."""
CONTROL_SECONDS = 3.0
"""Within which every process follows a control that was edited."""
LOG_BYTES = 1 << 20
"""What an engine may log that cannot allocate for some seconds."""


@dataclass
class Verdict:
    """Everything but the figures on the work done has to be 0."""

    lost_turns: int = 0
    """Turns whose storage was acknowledged and that are gone, changed or out of their record, unless
    it has expired, and turns of scored records without the results of their tool calls."""
    double_trained: int = 0
    """Records in more optimizer steps of the final weights than allowed, or than the ledger says."""
    skipped: int = 0
    """Records that the ledger calls trained and that the weights never saw, or that the ledger
    passed over."""
    incomplete_groups: int = 0
    fencing_violations: int = 0
    """Writes that were accepted after a later claim of the same record had been granted."""
    attempts_booked_wrongly: int = 0
    """Attempts that ended as failed although nothing had befallen their holder or its way to the
    store, its tools and its server."""
    trained_stale: int = 0
    """Records in a step of the final weights that were older than `max_staleness`."""
    wrong_counts: int = 0
    """Counts of the store's reports that differ from a count of every document."""
    broken_branches: int = 0
    """Records of later rounds that began before a Record of an earlier one had ended, whose choice
    changed or is missing, or whose turns before the branch are not those of a scored parent."""
    expired_early: int = 0
    """Records that expired before a trainer had consumed them, with a step that was to be kept, or
    only in part, and expired ones that still have turns."""
    wrong_resumes: int = 0
    """Starts of the trainer that took another checkpoint than the newest intact one, or did not keep
    the damaged one."""
    unclean_stops: int = 0
    """Processes that did not end in order after SIGTERM or SIGINT."""
    claims_under_bad_controls: int = 0
    engine_failures: int = 0
    """Engines that did not recover once they had memory again, or logged without bound."""
    broken_copies: int = 0
    """Damaged exports that were imported or left something behind, and intact ones that differ from
    their import."""
    lost_scores: int = 0
    """Records that the trainer dropped because nobody scored them, although their scorer never fails."""
    num_expired: int = 0
    """Turns that were acknowledged and have expired."""
    num_branches: int = 0
    num_groups: int = 0
    num_turns: int = 0
    num_steps: int = 0
    num_taken_up: int = 0
    num_attempts_lost: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Records that the trainer dropped, by reason."""
    examples: list[str] = field(default_factory=list)
    """The first few findings."""

    def find(self, kind: str, what: str) -> None:
        """Count a finding."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {what}")


async def judge(
    store: TrajectoryStore,
    folder: Path,
    *,
    max_staleness: int,
    retain_steps: int,
) -> Verdict:
    """Compare the journals of samplers, trainer and harness with what the store holds at the end.

    Args:
        store: of the run.
        folder: holds the journals and the trainer's output.
        max_staleness: of the trainer.
        retain_steps: of the trainer.
    """
    verdict = Verdict()
    events = list(read_journal(folder / "samplers.jsonl"))
    trained = list(read_journal(folder / "trainer.jsonl"))
    faults = list(read_journal(folder / "faults.jsonl"))
    await _check_turns(store, [e for e in events if e["kind"] == "turn"], verdict)
    _check_fencing(events, verdict)
    await _check_groups(store, verdict)
    await _check_branches(store, events, verdict)
    steps = effective_steps(trained)
    await _check_expiry(store, max(steps, default=0) - retain_steps, verdict)
    await _check_ledger(store, steps, verdict)
    await _check_staleness(store, events, steps, max_staleness, verdict)
    await _check_attempts(store, events, faults, verdict)
    for wrong in await wrong_counts(store):
        verdict.find("wrong_counts", wrong)
    check_faults(faults, events, trained, folder, verdict)
    return verdict


async def _check_turns(store: TrajectoryStore, turns: list[Event], verdict: Verdict) -> None:
    by_record: defaultdict[str, list[Event]] = defaultdict(list)
    for event in turns:
        by_record[event["record"]].append(event)
    verdict.num_turns = len(turns)
    expired = {one.id async for one in store.records.find() if one.expired_at is not None}
    for record_id, noted in by_record.items():
        if record_id in expired:
            verdict.num_expired += len(noted)
            continue
        attempts = {event["attempt"] for event in noted}
        found = {
            turn.id: digest(turn)
            for attempt in attempts
            for turn in await _turns(store.turns.of_record(record_id, attempt))
        }
        for event in noted:
            if found.get(event["id"]) != event["digest"]:
                verdict.find("lost_turns", event["id"])


async def _turns(reading: Awaitable[list[DispatchedSamplingTask]]) -> list[DispatchedSamplingTask]:
    """Return what can be read; a turn that is named and not there makes that nothing."""
    try:
        return await reading
    except StoreError:
        return []


def _check_fencing(events: Iterable[Event], verdict: Verdict) -> None:
    claims: defaultdict[str, list[Event]] = defaultdict(list)
    writes: list[Event] = []
    for event in events:
        (claims[event["record"]] if event["kind"] == "claim" else writes).append(event)
    for record_id, granted in claims.items():
        for fence, number in Counter(event["fence"] for event in granted).items():
            if number > 1:
                verdict.find("fencing_violations", f"{record_id}: fence {fence} granted twice")
    for event in writes:
        later = [c for c in claims[event["record"]] if c["fence"] > event["fence"]]
        if any(claim["at"] < event["begun"] for claim in later):
            verdict.find("fencing_violations", f"{event['kind']} of {event['record']}")


async def _check_groups(store: TrajectoryStore, verdict: Verdict) -> None:
    async for task in store.tasks.find():
        verdict.num_groups += 1
        records = await store.records.of_task(task.id)
        whole = len(records) == task.num_generations and task.status == "completed"
        if not whole or any(record.status not in TERMINAL_STATUSES for record in records):
            verdict.find("incomplete_groups", task.id)
        for record in records:
            ends = [attempt.ended_by for attempt in record.attempts]
            verdict.num_attempts_lost += ends.count("expired")
            verdict.num_taken_up += sum(a.first_turn > 0 for a in record.attempts)
            if record.status == "scored" and record.expired_at is None:
                for turn in await _turns(store.turns.get_many(record.turns)):
                    is_cut = turn.finish_reason == "length"  # its calls are not made
                    if not is_cut and len(turn.tool_results) != len(turn.tool_calls):
                        verdict.find("lost_turns", f"{turn.id}: no tool results")
            fences = [attempt.fence for attempt in record.attempts]
            if fences != sorted(set(fences)):
                verdict.find("fencing_violations", f"{record.id}: attempts {fences}")


async def _check_branches(store: TrajectoryStore, events: list[Event], verdict: Verdict) -> None:
    chosen: defaultdict[str, set[str]] = defaultdict(set)
    first_claim: dict[str, float] = {}
    last_write: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["kind"] == "claim":
            first_claim.setdefault(event["record"], event["at"])
        else:
            last_write[event["record"]] = max(last_write[event["record"]], event["begun"])
        if event["kind"] == "choose_branch":
            chosen[event["record"]].add(event["chosen"])
    records = {record.id: record async for record in store.records.find()}
    for record in records.values():
        if record.round == 0:
            continue
        verdict.num_branches += record.branch is not None
        siblings = (one for one in records.values() if one.task_id == record.task_id)
        last = max(last_write[one.id] for one in siblings if one.round < record.round)
        if first_claim.get(record.id, math.inf) < last:
            verdict.find("broken_branches", f"{record.id} began before an earlier round had ended")
        # A sampler may die before it notes its choice.
        kept = record.no_branch if record.branch is None else record.branch.model_dump_json()
        if record.status == "scored" and (not kept or chosen[record.id] - {kept}):
            verdict.find("broken_branches", f"{record.id}: {kept!r}, chosen {chosen[record.id]}")
        if record.branch is not None and record.status == "scored" and record.expired_at is None:
            point = record.branch
            parent = records[point.record_id]
            own = await _turns(store.turns.get_many(record.turns))
            theirs = await _turns(store.turns.of_record(parent.id, point.attempt))
            copied = [digest(turn) for turn in own[: point.turn]]
            if (
                (parent.status, parent.attempt) != ("scored", point.attempt)
                or copied != [digest(turn) for turn in theirs[: point.turn]]
                or len(copied) < point.turn
                or len(own) <= point.turn
            ):
                verdict.find("broken_branches", f"{record.id} left {parent.id} at {point.turn}")


def effective_steps(events: Iterable[Event]) -> dict[int, list[str]]:
    """Return the records of the steps behind the final weights: what a crash took back is out."""
    steps: dict[int, list[str]] = {}
    for event in events:
        if event["kind"] == "resume":
            steps = {step: ids for step, ids in steps.items() if step <= event["step"]}
        else:
            steps[event["step"]] = event["records"]
    return steps


async def _check_expiry(store: TrajectoryStore, last_step: int, verdict: Verdict) -> None:
    async for data in store.database["record_data"].find({"expired_at": {"$ne": None}}):
        entry = data["ledger"].get("trainer", {})
        if entry.get("status") not in ("trained", "dropped"):
            verdict.find("expired_early", f"{data['_id']}: not consumed")
        elif (entry.get("step") or 0) > last_step:
            verdict.find("expired_early", f"{data['_id']}: of step {entry['step']}")
    async for record in store.records.find():
        left = {"record_id": record.id}
        if record.expired_at is not None and await store.database["turns"].count_documents(left):
            verdict.find("expired_early", f"{record.id}: in part")


async def _check_ledger(
    store: TrajectoryStore, steps: dict[int, list[str]], verdict: Verdict
) -> None:
    verdict.num_steps = len(steps)
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for step, record_ids in sorted(steps.items()):
        for record_id in record_ids:
            seen[record_id].append(step)
    consumed: set[str] = set()
    for status in ("trained", "dropped"):
        async for data in store.ledger.find(status=status):
            consumed.add(data.record_id)
            entry = data.ledger["trainer"]
            noted = list(entry.trained_at)
            if entry.status == "dropped":
                _note_drop(data.record_id, entry.reason or "", verdict)
            if len(seen[data.record_id]) > max(1, len(noted)):
                verdict.find("double_trained", f"{data.record_id}: {seen[data.record_id]}, {noted}")
            elif seen[data.record_id] != noted:
                verdict.find("skipped", f"{data.record_id}: {seen[data.record_id]}, {noted}")
    async for record in store.records.find(split="train"):
        if record.id not in consumed:
            kind = "double_trained" if seen[record.id] else "skipped"
            verdict.find(kind, f"{record.id}: not in the ledger")


def _note_drop(record_id: str, reason: str, verdict: Verdict) -> None:
    verdict.dropped[reason] = verdict.dropped.get(reason, 0) + 1
    if reason == "no_score":
        verdict.find("lost_scores", record_id)


async def _check_staleness(
    store: TrajectoryStore,
    events: list[Event],
    steps: dict[int, list[str]],
    max_staleness: int,
    verdict: Verdict,
) -> None:
    """Compare the versions of records with the steps; what a branch copied is not its own."""
    oldest: dict[str, int | None] = {}
    sampled: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for event in events:
        if event["kind"] == "turn" and event["version"] is not None:
            sampled[event["record"], event["attempt"]][event["index"]] = event["version"]
    async for record in store.records.find(split="train"):
        oldest[record.id] = record.min_version
        if record.branch is not None:
            own = sampled[record.id, record.attempt].items()
            oldest[record.id] = min((v for i, v in own if i >= record.branch.turn), default=None)
    for step, record_ids in steps.items():
        for record_id in record_ids:
            version = oldest.get(record_id)
            if version is not None and step - 1 - version > max_staleness:
                verdict.find("trained_stale", f"{record_id}: version {version} in step {step}")


async def _check_attempts(
    store: TrajectoryStore, events: list[Event], faults: list[Event], verdict: Verdict
) -> None:
    names = {str(one["process"]): one["member"] for one in faults if one["kind"] == "start"}
    struck = [one for one in faults if one["kind"] == "fault"]
    claims: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for event in events:
        if event["kind"] == "claim":
            claims[event["record"]][event["fence"]] = event["at"]
    async for record in store.records.find():
        for attempt in record.attempts:
            if attempt.ended_by not in ("expired", "error"):
                continue
            granted = claims[record.id]
            # A holder that was killed before it noted its claim has no claim: it was struck.
            began = granted.get(attempt.fence)
            ended = min((at for f, at in granted.items() if f > attempt.fence), default=None)
            holder = names.get(attempt.owner.partition(":")[2].partition(":")[0], attempt.owner)
            if began is not None and not any(
                _explains(fault, holder, attempt.ended_by)
                for fault in struck
                if fault["ended"] + HARNESS_SECONDS > began
                and (ended is None or fault["began"] < ended)
            ):
                what = f"{attempt.ended_by}: {attempt.error}"
                verdict.find("attempts_booked_wrongly", f"{record.id} of {holder}: {what}")


def _explains(fault: Event, holder: str, ended_by: str) -> bool:
    """Whether a fault is a reason for an attempt of this holder to fail."""
    kind, victim = fault["fault"], fault["victim"]
    if kind == "network":
        near, _, far = victim.partition(">")
        return near in (holder, "everyone") and (far == "mongod") == (ended_by == "expired")
    if kind in ("tools", "memory"):
        return ended_by == "error"
    return kind in HOLDERS_OWN and victim in (holder, "launcher")


def check_faults(
    faults: list[Event], events: list[Event], trained: list[Event], folder: Path, verdict: Verdict
) -> None:
    """Judge what came of the faults of files, memory, settings and signals.

    Args:
        faults: the harness's journal.
        events: the samplers' journal.
        trained: the trainer's journal.
        folder: holds the trainer's output.
        verdict: takes the findings.
    """
    names = {str(one["process"]): one["member"] for one in faults if one["kind"] == "start"}
    checkpoints = folder / "output" / "checkpoints"
    for fault in (one for one in faults if one["kind"] == "fault"):
        if fault["fault"] == "checkpoint":
            resumed = [e for e in trained if e["kind"] == "resume" and e["at"] > fault["started"]]
            kept = list(checkpoints.glob(f"{fault['damaged']}.damaged*"))
            if not kept or not resumed or resumed[0]["step"] != fault["intact"]:
                said = resumed[0]["step"] if resumed else "nothing"
                what = f"{fault['file']} of {fault['damaged']} ({fault['how']})"
                verdict.find("wrong_resumes", f"{what}: resumed {said}, kept {len(kept)}")
        elif fault["fault"] == "stop" and fault["status"] != 0:
            what = f"{fault['victim']}, {fault['how']}: {fault['status']}, {fault['said']}"
            verdict.find("unclean_stops", what)
        elif fault["fault"] == "memory":
            if not fault["is_recovered"] or fault["log_bytes"] > LOG_BYTES:
                verdict.find("engine_failures", str(fault))
        elif fault["fault"] == "export":
            if not fault.get("is_refused") or fault["left_behind"] or fault["differing"]:
                verdict.find("broken_copies", str(fault))
        elif fault["fault"] == "control":
            _check_claims(fault, events, names, verdict)


def _check_claims(
    fault: Event, events: list[Event], names: dict[str, str], verdict: Verdict
) -> None:
    for event in events:
        if event["kind"] != "claim":
            continue
        holder = names.get(event["owner"].partition(":")[2].partition(":")[0], event["owner"])
        follows = fault["how"] != "scorer" or holder != "sampler-b"  # which scores nothing
        if follows and fault["began"] + CONTROL_SECONDS < event["at"] < fault["ended"]:
            verdict.find("claims_under_bad_controls", f"{event['record']} by {holder}")
