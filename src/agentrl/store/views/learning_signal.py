"""The learning signal in the groups that a trainer consumed, and missing scores, as text.

Groups of equal scores have no gradient. These figures distinguish a run that learns nothing from
one that is slow.
"""

import asyncio
import textwrap
from collections.abc import Sequence
from statistics import median

from agentrl.runtime.installation import typed_command
from agentrl.schema.base import Value
from agentrl.schema.training import EQUAL_SCORES
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import UNSCORABLE

NUM_EXAMPLES = 3
SLOW_SECONDS = 60.0
"""A scorer that takes longer is reported as slow."""
_RECENT_STEPS = 5
_MAX_KL = 0.1
"""Ten times the limit of a healthy run; the demo's healthy runs stay below a fifth of it."""
_MAX_NORM_JUMP, _MIN_CALL_SHARE = 10.0, 0.2
_ANSWER_CHARACTERS, _ERROR_CHARACTERS = 100, 400
"""Displayed characters of an answer, and of an error, which ends with its place in the user's
file."""


class ScoredAnswer(Value):
    """One record as an example."""

    record_id: str
    answer: str | None
    score: float | None
    outcome: str | None = None
    """Why there is no answer."""
    error: str | None = None
    reply: str | None = None
    """The last reply, of a record without an answer."""

    def __str__(self) -> str:
        score = "no score" if self.score is None else f"score {self.score:g}"
        answer = (
            " ".join(filter(None, ("no answer", self.outcome and f"({self.outcome})")))
            if self.answer is None
            else f"answered {_shortened(self.answer, _ANSWER_CHARACTERS)!r}"
        )
        reason = "" if self.error is None else f" ({_shortened(self.error, _ERROR_CHARACTERS)})"
        wrote = (
            "" if not self.reply else f"; it wrote {_shortened(self.reply, _ANSWER_CHARACTERS)!r}"
        )
        return f"{self.record_id}: {answer}, {score}{reason}{wrote}"


class LearningSignal(Value):
    """The groups that a trainer consumed, with and without a learning signal."""

    run_name: str
    num_groups: int
    num_equal: int
    """Groups dropped for equal scores."""
    num_kept: int
    """Groups that a step trained on."""
    mean_score: float | None
    examples: tuple[ScoredAnswer, ...] = ()

    def __str__(self) -> str:
        """Return finding, examples and advice as several lines."""
        mean = "no scores" if self.mean_score is None else f"mean {self.mean_score:.3f}"
        shown = (f"  {example}" for example in self.examples)
        first = f"{self.num_equal} of {self.num_groups} groups had equal scores ({mean})"
        return "\n".join([first, *shown, *(f"  what to try: {line}" for line in self._advice())])

    def _advice(self) -> list[str]:
        if self.num_equal + self.num_kept < self.num_groups:
            return ["find out why records were dropped or have no score: agentrl inspect failures"]
        if self.mean_score is not None and self.mean_score > 0.5:
            return ["use harder questions; these are always answered correctly"]
        if self.examples and all(example.error is not None for example in self.examples):
            return [
                "fix the errors above, then score the existing answers with `agentrl store rescore`"
            ]
        if self.examples and all(example.answer is None for example in self.examples):
            run_option = ("--run_name", self.run_name)
            command = typed_command("inspect", "record", self.examples[0].record_id, *run_option)
            return [
                f"see what the model did instead of answering: {command}; raise --max_turns or "
                "--max_new_tokens if it was cut",
                *ways_to_a_signal(),
            ]
        return [
            "compare the answers above with the scorer and --answer_schema",
            *ways_to_a_signal(),
        ]


def ways_to_a_signal() -> list[str]:
    """Return what gives a model that is always wrong something to learn from, one way a line."""
    return [
        "demonstrations first: --warm_start FILE.yaml, or agentrl sft --train_file "
        "DEMONSTRATIONS.jsonl (docs/sft.md)",
        "or learn from a stronger model: run it on these questions, then agentrl sft --records_of "
        "THAT_RUN --min_score 1",
        "a --system_prompt with the format and an example; easier questions first; a scorer that "
        "pays for parts (docs/bring-your-own.md)",
        "a lower --temperature if the replies ramble; more --num_generations if some are right",
    ]


class MissingScores(Value):
    """Records without a score, by reason."""

    num_unscorable: int
    """Dead-lettered because the scorer raised the same error twice."""
    num_waiting: int
    """Postponed because a judge or the network was down."""
    num_failed: int
    """Failed permanently during the rollout."""
    unscorable: ScoredAnswer | None = None
    waiting: ScoredAnswer | None = None
    num_slow: int = 0
    """Being scored for longer than `SLOW_SECONDS`."""
    slow: ScoredAnswer | None = None


async def read_signal(
    database: RunDatabase, consumer: str, *, step: int | None = None
) -> LearningSignal:
    """Return what the trainer `consumer` found in the training groups that it consumed."""
    status, reason = f"$ledger.{consumer}.status", f"$ledger.{consumer}.reason"
    consumed: Document = {
        "split": "train",
        f"ledger.{consumer}.status": {"$in": ["dropped", "reserved", "trained"]},
    }
    if step is not None:
        consumed[f"ledger.{consumer}.step"] = step
    found = await database.aggregate(
        database.record_data,
        [
            {"$match": consumed},
            {
                "$group": {
                    "_id": "$task_id",
                    "order": {"$first": "$order"},
                    "kept": {"$max": {"$ne": [status, "dropped"]}},
                    "equal": {"$max": {"$eq": [reason, EQUAL_SCORES]}},
                    "sum": {"$sum": "$score.value"},
                    "num": {"$sum": {"$cond": [{"$isNumber": "$score.value"}, 1, 0]}},
                }
            },
            {"$sort": {"order": 1}},
        ],
    )
    num_scores = sum(group["num"] for group in found)
    first_ids = [group["_id"] for group in found[:NUM_EXAMPLES]]
    examples = {
        document["task_id"]: document
        async for document in database.records.find({"task_id": {"$in": first_ids}, "traj_id": 0})
    }
    return LearningSignal(
        run_name=database.name,
        num_groups=len(found),
        num_equal=sum(group["equal"] and not group["kept"] for group in found),
        num_kept=sum(group["kept"] for group in found),
        mean_score=sum(group["sum"] for group in found) / num_scores if num_scores else None,
        examples=tuple(
            scored_answer(examples[task_id]) for task_id in first_ids if task_id in examples
        ),
    )


async def read_missing_scores(database: RunDatabase) -> MissingScores:
    """Return how many ended records have no score, and examples."""
    waiting = {"status": "finished", "error": {"$ne": None}}
    is_held = {"lease.owner": {"$nin": ["", None]}}
    since = {"$subtract": ["$$NOW", SLOW_SECONDS * 1000]}
    is_old = {"$lt": ["$finished_at", since]}
    # An expired lease is that of a process that died, perhaps in an earlier start of the run.
    is_alive = {"$gt": ["$lease.expires_at", "$$NOW"]}
    slow = {"status": "finished", "error": None, **is_held, "$expr": {"$and": [is_old, is_alive]}}
    records = database.records
    num_unscorable, num_failed, num_waiting, num_slow = await asyncio.gather(
        records.count_documents(UNSCORABLE),
        # Counted directly, because a record may fail between two counts that are subtracted.
        records.count_documents({"status": "failed", "$nor": [UNSCORABLE]}),
        records.count_documents(waiting),
        records.count_documents(slow),
    )
    one_unscorable = await records.find_one(UNSCORABLE) if num_unscorable else None
    one_waiting = await records.find_one(waiting) if num_waiting else None
    one_slow = await records.find_one(slow, sort=[("finished_at", 1)]) if num_slow else None
    return MissingScores(
        num_unscorable=num_unscorable,
        num_waiting=num_waiting,
        num_failed=num_failed,
        unscorable=scored_answer(one_unscorable) if one_unscorable else None,
        waiting=scored_answer(one_waiting) if one_waiting else None,
        num_slow=num_slow,
        slow=scored_answer(one_slow) if one_slow else None,
    )


def damage_text(steps: Sequence[Document], evaluations: Sequence[Document]) -> str | None:
    """Return by which figures the policy falls apart, far beyond the limits of `docs/metrics.md`.

    Args:
        steps: figures of the last steps, oldest first.
        evaluations: figures of all evaluations, oldest first.
    """
    found = []
    recent, before = steps[-_RECENT_STEPS:], steps[:-2]
    far = [one for one in recent if (one.get("sampler_kl_k3") or 0.0) > _MAX_KL]
    if far:
        kl = far[-1]["sampler_kl_k3"]
        found.append(
            f"KL between trainer and sampler {kl:.2g} at step {far[-1]['step']} (healthy: below 0.01)"
        )
    norms = [one["grad_norm"] for one in before if one.get("grad_norm")]
    last = [one.get("grad_norm") or 0.0 for one in steps[-2:]]
    if len(norms) >= _RECENT_STEPS and min(last) > _MAX_NORM_JUMP * median(norms):
        found.append(f"gradient norm {median(norms):.2g} -> {last[-1]:.2g}")
    if len(evaluations) > 1:
        found += _held_out_falls(evaluations[:-1], evaluations[-1])
    if not found:
        return None
    return (
        f"the policy falls apart: {'; '.join(found)}; start a new run with a smaller --learning_rate "
        "(docs/metrics.md)"
    )


def _held_out_falls(earlier: Sequence[Document], last: Document) -> list[str]:
    found = []
    best = max(earlier, key=lambda one: one["reward_mean"])
    low, high = (best.get("total") or {}).get("low"), (last.get("total") or {}).get("high")
    if low is not None and high is not None and high < low:
        found.append(f"held-out reward {best['reward_mean']:.3f} -> {last['reward_mean']:.3f}")
    called = max((one.get("call_share") or 0.0 for one in earlier), default=0.0)
    share = last.get("call_share")
    if share is not None and share < _MIN_CALL_SHARE * called:
        found.append(f"held-out rollouts that call a tool {called:.0%} -> {share:.0%}")
    return found


def scored_answer(document: Document) -> ScoredAnswer:
    """Return a record's document as an example."""
    score = document.get("score")
    return ScoredAnswer(
        record_id=document["_id"],
        answer=document.get("final_answer"),
        score=None if score is None else score["value"],
        outcome=document.get("outcome"),
        error=document.get("error"),
    )


def _shortened(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder="...")
