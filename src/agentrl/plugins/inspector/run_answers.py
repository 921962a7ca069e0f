"""One run as JSON values: a line of the list, the overview, its steps, its errors.

Input: a store. Output: dictionaries.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from agentrl.config.secrets import redact
from agentrl.errors import StoreError
from agentrl.plugins.inspector.alarms import ALARM_STEPS, find_alarms
from agentrl.runtime.installation import typed_command
from agentrl.schema import Run
from agentrl.schema.task import id_of_task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.store.views.behavior import QuestionKind, common_text
from agentrl.store.views.browsing import GroupFilter, GroupRow
from agentrl.store.views.reports import Failure

_NO_PROOFS = {"data_proof": None, "control_proof": None}
_SPARK_STEPS = 60
_RECENT_GROUPS = 48
_MAX_TIMES = 40
_ERRORS_READ = 500
_EXAMPLES, _EXAMPLE_CHARS = 20, 2000


async def run_row(store: TrajectoryStore) -> dict[str, Any]:
    """Return a run as a line of the list of runs."""
    run = await run_of(store)
    consumer = consumer_of(run)
    steps = await store.figures.last_steps(consumer, _SPARK_STEPS)
    evals = await store.figures.evaluations(consumer)
    return {
        "name": run.name,
        **await _state(store, run),
        "policy_version": run.policy_version,
        "step": steps[-1]["step"] if steps else 0,
        "max_steps": run.config.get("max_steps"),
        "rewards": [step.get("reward_mean") for step in steps],
        "eval": evals[-1].get("reward_mean") if evals else None,
        "model": run.config.get("model_name_or_path"),
        "is_imported": run.is_imported,
        "created_at": run.created_at,
        "updated_at": run.updated_at,
    }


async def _state(store: TrajectoryStore, run: Run) -> dict[str, Any]:
    """Return a run's status, and whether some process works on it."""
    status = await store.reports.state()
    is_started = status == "created" and run.phase is not None
    return {"status": status, "is_live": status == "training" or is_started}


async def overview(store: TrajectoryStore) -> dict[str, Any]:
    """Return the state of a run: counts, fleet, controls, alarms."""
    run = await run_of(store)
    consumer = consumer_of(run)
    fleet = await store.reports.processes()
    missing = await store.reports.missing_scores()
    progress = await store.reports.progress(consumer)
    recent = await store.browse.groups(GroupFilter(), limit=_RECENT_GROUPS, newest=True)
    completed = [group for group in recent.groups if group.status == "completed"]
    given = await store.browse.answers([group.task_id for group in completed])
    answers = [tuple(given.get(group.task_id, ())) for group in completed]
    steps = await store.figures.last_steps(consumer, ALARM_STEPS)
    evaluations = await store.figures.evaluations(consumer)
    alarms = find_alarms(run, steps, fleet, missing, answers, evaluations)
    state = await _state(store, run)
    is_untrained = state["status"] == "interrupted" and run.policy_version == 0
    first = await store.reports.first_answers() if is_untrained else None
    return {
        "name": run.name,
        **state,
        "first_answers": None if first is None else str(first),
        "consumer": consumer,
        "policy_version": run.policy_version,
        "admitted_groups": run.admitted_groups,
        "control": run.control.model_dump(mode="json"),
        "control_problems": run.control_problems,
        "is_imported": run.is_imported,
        "control_log": [one.model_dump(mode="json") for one in run.control_log[-20:]],
        "trainer_leases": {
            name: lease.model_dump(mode="json") for name, lease in run.trainer_leases.items()
        },
        "progress": progress.model_dump(mode="json"),
        "fleet": {
            "now": fleet.now,
            "services": [
                {**one.model_dump(mode="json"), "base_url": redact(one.base_url), **_NO_PROOFS}
                for one in fleet.services
            ],
            "samplers": [one.model_dump(mode="json") for one in fleet.samplers],
        },
        "missing": missing.model_dump(mode="json"),
        "alarms": [alarm.model_dump(mode="json") for alarm in alarms],
        "reward_by_tag": _reward_by_tag(completed),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
    }


def _reward_by_tag(groups: Sequence[GroupRow]) -> dict[str, dict[str, float]]:
    """Return mean score and number of rollouts by label, over the last completed groups."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for tag in group.tags or ((group.tag,) if group.tag else ()):
            scores[tag] += [one.score for one in group.tries if one.score is not None]
    return {
        tag: {"mean": sum(found) / len(found), "num": len(found)}
        for tag, found in sorted(scores.items())
        if found
    }


async def step_answer(store: TrajectoryStore, step: int) -> dict[str, Any]:
    """Return one optimizer step: its figures, its records, and the resulting weights."""
    consumer = consumer_of(await run_of(store))
    figures = await store.figures.step(consumer, step)
    records = await store.lineage.records_of_step(step, consumer)
    policy = await store.policies.of_step(step)
    if figures is None and policy is None and not records:
        raise StoreError(f"the trainer {consumer!r} has not made step {step} yet")
    last = await store.figures.last_steps(consumer, 1)
    return {
        "step": step,
        "consumer": consumer,
        "figures": figures,
        "policy": None if policy is None else policy.model_dump(mode="json"),
        "last": last[-1]["step"] if last else step,
        "records": [one.model_dump(mode="json") for one in records],
    }


async def other_times(store: TrajectoryStore, run: Run, task_id: str) -> list[GroupRow]:
    """Return the groups in which a question was asked in other epochs or of other versions."""
    split, _, rest = task_id.partition("/")
    _, _, question = rest.partition("/")
    if split == "train":
        times = [*range(min(int(run.config.get("num_train_epochs") or 1), _MAX_TIMES))]
    else:
        evals = await store.figures.evaluations(consumer_of(run))
        times = [evaluation["version"] for evaluation in evals][-_MAX_TIMES:]
    ids = [id_of_task(split, time, question) for time in times] if question else []
    found = await store.browse.rows([other_id for other_id in ids if other_id != task_id])
    return [row for row in found if any(rollout.score is not None for rollout in row.tries)]


async def distributions(store: TrajectoryStore) -> dict[str, Any]:
    """Return sizes and outcomes of rollouts at some steps of the run."""
    consumer = consumer_of(await run_of(store))
    return await store.behavior.distributions(consumer, await _last_step(store, consumer))


async def run_tabs(store: TrajectoryStore) -> dict[str, Any]:
    """Return what the run has pages for."""
    return {
        "last_step": await _last_step(store, consumer_of(await run_of(store))),
        "has_evaluations": await store.behavior.has_evaluations(),
        "is_running": bool(await store.behavior.running(1)),
        "has_forks": bool(await store.forks.newest(1)),
        "has_diffs": await store.figures.has_diffs(),
    }


async def _last_step(store: TrajectoryStore, consumer: str) -> int:
    last = await store.figures.last_steps(consumer, 1)
    return last[0]["step"] if last else 0


def question_commands(run_name: str, kind: QuestionKind) -> list[list[str]]:
    """Return what to do with questions that teach nothing: sentence and command."""
    option = ("--run_name", run_name)
    add = typed_command("tasks", "add", "--train_file", "QUESTIONS.jsonl", *option)
    if kind == "nobody":
        return [
            [
                "Read what the model answers: a scorer or an answer format may be at fault.",
                typed_command("inspect", "records", "--score", "<=0", *option),
            ],
            ["Add easier questions of the same kind, which are solved sometimes.", add],
            [
                "Ask questions again whose rollouts failed for reasons of the machines.",
                typed_command("tasks", "retry", *option),
            ],
        ]
    if kind == "everybody":
        return [
            ["Add harder questions: these have equal scores and no gradient.", add],
            [
                "See what is left to ask before you leave these out of --train_file.",
                typed_command("tasks", "stats", *option),
            ],
        ]
    return []


async def errors(store: TrajectoryStore) -> dict[str, Any]:
    """Return the errors of a run, grouped by their common text."""
    found = await store.reports.failures(_ERRORS_READ)
    groups: defaultdict[str, list[Failure]] = defaultdict(list)
    for failure in found:
        groups[common_text(_reason(failure))].append(failure)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return {
        "is_cut": len(found) == _ERRORS_READ,
        "errors": [
            {
                "text": text,
                "num": len(failures),
                "statuses": dict(Counter(failure.status for failure in failures)),
                "records": [failure.record_id for failure in failures[:_EXAMPLES]],
                "example": _reason(failures[0])[:_EXAMPLE_CHARS],
            }
            for text, failures in ordered
        ],
    }


def _reason(failure: Failure) -> str:
    return failure.error or failure.last_error or "no reason recorded"


def consumer_of(run: Run) -> str:
    """Return the name of the trainer whose figures are shown."""
    return str(run.config.get("consumer") or DEFAULT_CONSUMER)


async def run_of(store: TrajectoryStore) -> Run:
    """Return the run of a store."""
    run = await store.runs.get()
    if run is None:
        raise StoreError(f"{store.database_name} no longer contains a run")
    return run
