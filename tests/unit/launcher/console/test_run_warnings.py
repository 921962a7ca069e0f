"""What the console says while a run goes on."""

import pytest
from support.stored import claim, fill, make_task, make_turn, play

from agentrl.launcher.console import progress_display
from agentrl.launcher.console.progress_display import RunWarnings
from agentrl.runtime.installation import typed_command
from agentrl.schema import Control, Policy, Run, SamplerInfo, Score
from agentrl.schema.training import EQUAL_SCORES
from agentrl.store import TrajectoryStore
from agentrl.store.views import learning_signal
from agentrl.store.views.first_answers import FirstAnswers
from agentrl.store.views.learning_signal import LearningSignal, ScoredAnswer


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_display, "CHECK_SECONDS", 0.0)


async def test_every_trouble_is_said_once(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add(make_task(number, num_generations=1) for number in range(8))
    warnings = RunWarnings(store)
    assert await warnings.new() == []

    record = await play(store, await claim(store), score=None)
    await store.scores.fail(record.id, record.fence, "scorer 'close' failed: ValueError (s.py:3)")
    record = await play(store, await claim(store), score=None)
    await store.scores.postpone(record.id, record.fence, "ScoringError: no judge", 60)
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "tools are away", 1)
    said = await warnings.new()
    assert [text.partition(":")[0] for text in said] == [
        "a scorer failed, and its records have no score",
        "a score is missing and scoring is retried",
        "all attempts failed for 1 record, last train/0/q2/0",
    ]
    assert said[2].partition(": ")[2].startswith("tools are away; see ")
    assert "train/0/q0/0: answered '4', no score (scorer 'close' failed" in said[0]
    assert "(s.py:3)" in said[0]
    assert "no judge" in said[1]

    ids = [(await play(store, await claim(store), score=0.0)).id for _ in range(4)]
    assert await warnings.new() == []
    await store.trainer_leases.acquire("trainer", "me", 60)
    await store.ledger.drop("trainer", ids, 1, "zero_variance")
    (said_of_signal,) = await warnings.new()
    assert "4 of 4 groups had equal scores (mean 0.000)" in said_of_signal
    assert said_of_signal.count("score 0\n") == 3
    assert await warnings.new() == []


async def test_attempts_that_all_fail_are_told_before_their_record_is_given_up(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add(make_task(number, num_generations=1) for number in range(6))
    warnings = RunWarnings(store)
    for number in range(4):
        assert await warnings.new() == []
        record = await claim(store)
        await store.records.fail_attempt(record.id, record.fence, f"no choices {number}", 5)
    (said,) = await warnings.new()
    assert said.startswith("every attempt has failed so far, last train/0/q")
    assert ": no choices 3; see " in said
    assert said.endswith(f"inspect failures --run_name {store.database_name}")
    assert await warnings.new() == []


async def nine_groups_at_step_7(store: TrajectoryStore) -> list[str]:
    """The trainer waits for the two groups of step 7; return the ids of records scored 0."""
    control = Control(groups_per_step=2)
    run = Run(name="test", status="training", admitted_groups=99, control=control, policy_version=6)
    await store.runs.create(run)
    await store.runs.set_phase("sampling")
    await store.tasks.add(make_task(number, num_generations=1) for number in range(9))
    await store.trainer_leases.acquire("trainer", "me", 60)
    return [(await play(store, await claim(store), score=0.0)).id for _ in range(9)]


async def test_a_step_that_drops_all_it_gets_says_that_the_policy_may_have_collapsed(
    store: TrajectoryStore,
) -> None:
    ids = await nine_groups_at_step_7(store)
    warnings = RunWarnings(store)
    await store.ledger.drop("trainer", ids[:1], 6, EQUAL_SCORES)  # of the step before
    await store.ledger.drop("trainer", ids[1:8], 7, EQUAL_SCORES)
    assert await warnings.new() == []
    await store.ledger.drop("trainer", ids[8:], 7, EQUAL_SCORES)
    (said,) = await warnings.new()
    first, *_, last = said.splitlines()
    assert first == ("step 7 drops nearly every group: 8 of 8 groups had equal scores (mean 0.000)")
    assert "the policy has collapsed" in last
    assert "a smaller --learning_rate" in last
    assert await warnings.new() == []


async def test_a_step_that_keeps_some_of_its_groups_says_nothing(store: TrajectoryStore) -> None:
    ids = await nine_groups_at_step_7(store)
    await store.ledger.drop("trainer", ids[1:], 7, EQUAL_SCORES)
    await store.ledger.reserve("trainer", ids[:1], 7)
    assert await RunWarnings(store).new() == []


async def test_attempts_without_an_answer_say_why_and_where_to_look(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add(make_task(number, num_generations=1) for number in range(4))
    ids = []
    for _ in range(4):
        record = await claim(store)
        await store.records.finish(
            record.id, record.fence, outcome="turns_limit", final_answer=None, lease_seconds=60
        )
        await store.scores.set(record.id, record.fence, Score(scorer="exact", value=0.0))
        ids.append(record.id)
    await store.trainer_leases.acquire("trainer", "me", 60)
    await store.ledger.drop("trainer", ids, 1, "zero_variance")
    (said,) = await RunWarnings(store).new()
    assert "train/0/q0/0: no answer (turns_limit), score 0" in said
    look = f"inspect record train/0/q0/0 --run_name {store.database_name}"
    assert f"see what the model did instead of answering: {typed_command()} {look}" in said


async def test_a_scorer_that_hangs_is_told(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add(make_task(number, num_generations=1) for number in range(2))
    warnings = RunWarnings(store)
    await play(store, await claim(store), score=None)
    waits = await play(store, await claim(store), score=None)
    await store.scores.postpone(waits.id, waits.fence, None, 60)  # nobody has it: for its group
    assert await warnings.new() == []
    monkeypatch.setattr(learning_signal, "SLOW_SECONDS", 0.0)
    (said,) = await warnings.new()
    assert said.startswith("a scorer is slow: no score for 1 record after 60 s: ")
    assert "train/0/q0/0: answered '4', no score; the samplers' logs show where" in said
    assert await warnings.new() == []


async def test_a_scorer_whose_process_died_is_not_called_slow(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    await store.tasks.add([make_task(0, num_generations=1)])
    await play(store, await claim(store), score=None)
    expired = {"lease.expires_at": {"$subtract": ["$$NOW", 1000]}}
    await store.database["records"].update_one({}, [{"$set": expired}])
    monkeypatch.setattr(learning_signal, "SLOW_SECONDS", 0.0)
    assert await RunWarnings(store).new() == []


@pytest.mark.parametrize(
    ("scores", "lacks", "words"),
    [
        (
            [0.0, 0.0, 0.0, 0.0],
            True,
            [
                "the first 4 answers, to 2 questions, before any training: mean score 0.000",
                "0 % of the answers score above 0, 0 % of the questions at least once (pass@2)",
                "an answer was found in 100 %; 0 % reached the limit of tokens; tokens: median",
                "train/0/q0/0: answered '4', score 0",
                "all answers have the same score: there is nothing to learn from yet",
                "what to try: compare the answers with the scorer",
                "what to try: demonstrations first: --warm_start FILE.yaml, or agentrl sft",
                "agentrl sft --records_of",
                "a --system_prompt",
                "a lower --temperature",
            ],
        ),
        (
            [1.0, 1.0, 1.0, 1.0],
            True,
            ["100 % of the questions", "what to try: harder questions"],
        ),
        (
            [1.0, 0.0, 0.0, 0.0],
            False,
            ["mean score 0.250", "25 % of the answers score above 0, 50 % of the questions"],
        ),
    ],
)
async def test_the_first_answers_say_whether_there_is_something_to_learn(
    store: TrajectoryStore, scores: list[float], lacks: bool, words: list[str]
) -> None:
    await store.runs.create(
        Run(name="test", status="training", admitted_groups=9, control=Control(groups_per_step=2))
    )
    await store.tasks.add(make_task(number, num_generations=2) for number in range(2))
    warnings = RunWarnings(store)
    for score in scores[:-1]:
        await play(store, await claim(store), score=score)
        assert await first_answers(warnings) is None  # the second group is not complete
    await play(store, await claim(store), score=scores[-1])
    found = await first_answers(warnings)
    assert found is not None
    assert found.lacks_signal is lacks
    for text in words:
        assert text in str(found)
    assert ("nothing to learn" in str(found)) is lacks


async def test_few_first_answers_are_reported_after_some_minutes(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=99))
    await store.tasks.add([make_task(0, num_generations=20)])
    warnings = RunWarnings(store)
    for _ in range(8):
        await play(store, await claim(store), score=0.0)
    await store.runs.set_phase("sampling")
    assert await first_answers(warnings) is None
    monkeypatch.setattr(progress_display, "FIRST_ANSWERS_SECONDS", 0.0)
    found = await first_answers(warnings)
    assert found is not None
    assert found.figures.num_answers == 8


async def test_single_answers_to_several_questions_that_differ_are_a_signal(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "FIRST_ANSWERS_SECONDS", 0.0)
    monkeypatch.setattr(progress_display, "MIN_ANSWERS", 2)
    await store.runs.create(Run(name="test", status="training", admitted_groups=99))
    await store.tasks.add(make_task(number, num_generations=2) for number in range(2))
    held = [await claim(store) for _ in range(4)]  # two attempts at each question
    await play(store, held[0], score=1.0)
    await play(store, held[2], score=0.0)
    await store.runs.set_phase("sampling")
    found = await first_answers(RunWarnings(store))
    assert found is not None
    assert (found.num_questions, found.lacks_signal) == (2, False)


async def test_a_first_step_that_is_done_at_once_does_not_hide_the_first_answers(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=9))
    await store.tasks.add([make_task(0, num_generations=3)])
    warnings = RunWarnings(store)
    assert await first_answers(warnings) is None
    for score in (0.0, 1.0):
        await play(store, await claim(store), score=score)
    await store.policies.publish(Policy(version=1, path="/policy/1", num_bytes=0))
    found = await first_answers(warnings)
    assert found is not None
    assert "(pass@2)" in str(found)
    # A run that is resumed at a later step has shown them before.
    assert await first_answers(RunWarnings(store)) is None


async def test_replies_without_an_answer_are_shown_as_they_came(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=9))
    await store.tasks.add([make_task(0, num_generations=2)])
    for _ in range(2):
        record = await claim(store)
        turn = make_turn(record, 0).model_copy(update={"output_text": "It must be forty-two."})
        await store.turns.append(turn, record.fence)
        await store.records.finish(
            record.id, record.fence, outcome="no_answer", final_answer=None, lease_seconds=60
        )
        await store.scores.set(record.id, record.fence, Score(scorer="exact", value=0.0))
    found = await first_answers(RunWarnings(store))
    assert "no answer (no_answer), score 0; it wrote 'It must be forty-two.'" in str(found)
    assert "hardly any reply has an answer: tell the model how to answer" in str(found)


async def test_shares_of_questions_name_unequal_numbers_of_attempts(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "FIRST_ANSWERS_SECONDS", 0.0)
    monkeypatch.setattr(progress_display, "MIN_ANSWERS", 3)
    config = {"max_new_tokens": 64}
    await store.runs.create(Run(name="test", status="training", admitted_groups=9, config=config))
    await store.tasks.add(make_task(number, num_generations=3) for number in range(2))
    for _ in range(4):
        await play(store, await claim(store), score=0.0)
    await store.runs.set_phase("sampling")
    found = await first_answers(RunWarnings(store))
    assert "at least once (in 1 to 3 attempts each)" in str(found)
    assert "(--max_new_tokens 64 a reply)" in str(found)


async def first_answers(warnings: RunWarnings) -> FirstAnswers | None:
    await warnings.new()
    return warnings.first_answers


async def test_a_teacher_without_a_process_is_asked_for_once(store: TrajectoryStore) -> None:
    await fill(store, 1)
    await store.runs.create(
        Run(name=store.database_name, status="training", config={"teachers": ["big", "small"]})
    )
    await store.teaching.show_alive("small", "node-b:7:1-a", 60)
    warnings = RunWarnings(store)
    (said,) = await warnings.new()
    assert said.startswith(
        "no logprobs of teacher big yet for 2 records: no process of it is alive"
    )
    assert await warnings.new() == []


async def test_what_a_sampler_notices_of_itself_is_said_once(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="test", status="training", admitted_groups=1000))
    stands = "the agents' event loop has been blocked for 10 s at my_agent.py:4"
    await store.samplers.register(SamplerInfo(id="a", host="h", pid=1))
    warnings = RunWarnings(store)
    assert await warnings.new() == []
    for name in ("a", "b"):
        await store.samplers.heartbeat(SamplerInfo(id=name, host="h", pid=1, notice=stands))
    assert await warnings.new() == [f"sampler b: {stands}"]
    assert await warnings.new() == []


def test_attempts_that_failed_to_score_are_to_be_mended_first() -> None:
    failed = ScoredAnswer(record_id="train/0/q/0", answer="4", score=None, error="returned str")
    signal = LearningSignal(
        run_name="r", num_groups=1, num_equal=1, num_kept=0, mean_score=None, examples=(failed,)
    )
    assert (
        "what to try: fix the errors above, then score the existing answers with `agentrl store "
        "rescore`"
    ) in str(signal)


@pytest.mark.parametrize(
    ("num_kept", "advice"), [(2, "easier questions"), (1, "find out why records were dropped")]
)
def test_groups_that_a_step_keeps_are_not_among_those_to_ask_about(
    num_kept: int, advice: str
) -> None:
    signal = LearningSignal(
        run_name="r", num_groups=9, num_equal=7, num_kept=num_kept, mean_score=0.1
    )
    assert advice in str(signal)
