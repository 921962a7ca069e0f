"""Environments of other projects' packages, each in an interpreter of its own."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from harness.processes import listening_process
from harness.scripted_engine import ScriptedEngine, replies, serve_script
from support.agent_venvs import index_variables, python_with
from support.agents import assert_prompts_as_sent, open_stage
from support.harbor import write_task
from support.play import begin_run, claim, tool_call

from agentrl.config.sections import DataSection
from agentrl.data import TokenTree
from agentrl.datasets.task_stream import eval_tasks, train_tasks
from agentrl.errors import AgentError, ConfigError
from agentrl.plugins.environments import EnvironmentProcess, EnvironmentUri
from agentrl.plugins.environments.environment_sampler import EnvironmentProcesses
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.schema import DispatchedSamplingTask, EnvironmentTask, Score, Seat
from agentrl.store import TrajectoryStore
from examples.bfcl.demonstrations import played as leaderboard_games

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[2] / "benchmarks/harness/environments"
OPENENV_SERVER = Path(__file__).parents[1] / "support/environments/openenv_server.py"
OPENENV_TOOL_SERVER = OPENENV_SERVER.with_name("openenv_tool_server.py")
MODEL_DIR = Path(__file__).parents[2] / "assets/demo/model"


def data(env: str, **more: Any) -> DataSection:
    kind = env.partition(":")[0]
    return DataSection(env=env, env_python=python_with(kind), **more)


def tasks_of(section: DataSection, seed: int = 0) -> list[EnvironmentTask]:
    tasks = list(train_tasks(section, seed))
    assert all(isinstance(task, EnvironmentTask) for task in tasks)
    return [task for task in tasks if isinstance(task, EnvironmentTask)]


Played = tuple[RolloutResult, list[DispatchedSamplingTask], Score]


async def sampled(
    store: TrajectoryStore, section: DataSection, task: EnvironmentTask, engine: ScriptedEngine
) -> Played:
    """Play a task with an engine's policy; every prompt must be as it was sent."""
    await begin_run(store, engine, task)
    async with open_stage(store, engine) as stage:
        with EnvironmentProcesses.open(section, stage.endpoints) as environments:
            record, stored = await claim(store)
            assert stored == task.model_copy(update={"order": 0})
            sampler = environments.sampler(task, record, stage.context)
            result = await sampler.run()
            await sampler.finish()
            score = await sampler.evaluate_record(result)
    turns = await store.turns.of_record(record.id)
    assert_prompts_as_sent(turns, [body["input_ids"] for body in engine.requests])
    return result, turns, score


async def played(
    store: TrajectoryStore, section: DataSection, task: EnvironmentTask, *said: str
) -> Played:
    """Play a task with a policy that says these things; every id must be where it belongs."""
    renderer = Renderer.load(MODEL_DIR)
    with serve_script(renderer, replies(*said)) as engine:
        result, turns, score = await sampled(store, section, task, engine)
        drawn = [engine.reply_ids(text) for text in said]
    assert [turn.output_ids.tolist() for turn in turns] == drawn
    assert TokenTree.from_turns(turns).num_targets == sum(map(len, drawn))
    return result, turns, score


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ("reasoning_gym:leg_countin", "unknown name 'leg_countin'; did you mean leg_counting or"),
        (
            "reasoning_gym:leg_counting?sizee=3",
            "unknown parameter 'sizee'; did you mean size, seed",
        ),
        ("reasoning_gym:leg_counting?size=x", "size=x: expected a value such as 500"),
        ("reasoning_gym:leg_counting?size=0", "size=0: expected a number from 1"),
        ("reasoning_gym:leg_counting?seed=x", "seed=x: expected a value such as 0"),
        ("reasoning_gym:leg_counting?max_animals=1", "max_animals must be >= min_animals"),
        ("verifiers:no_such_taskset", "taskset 'no_such_taskset' not found"),
        ("openenv:http://127.0.0.1:9", "no OpenEnv server responds at this address"),
        ("openenv:127.0.0.1:8000", "expected an address, such as openenv:http://127.0.0.1:8000"),
        ("textarena:TicTacToe-v0", "TicTacToe-v0 is not a single-player game"),
        ("textarena:GuessTheNumber", "unknown name 'GuessTheNumber'; did you mean"),
        (
            "textarena:GuessTheNumber-v0?max_turn=3",
            "unknown parameter 'max_turn'; did you mean max_turns",
        ),
    ],
)
def test_a_mistake_is_said_in_one_line(env: str, problem: str) -> None:
    section = data(env)
    with (
        EnvironmentProcess(EnvironmentUri.parse(env), section, quiet=True) as environment,
        pytest.raises(ConfigError, match=problem) as caught,
    ):
        environment.size()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--env {env.partition('?')[0]}: ")


async def test_a_question_of_reasoning_gym_is_scored_by_its_data_set(
    store: TrajectoryStore,
) -> None:
    section = data("reasoning_gym:leg_counting?size=3&max_animals=3")
    tasks = tasks_of(section)
    assert sorted(task.row for task in tasks) == [0, 1, 2]
    assert {task.args["seed"] for task in tasks} == {0}
    said = f"It is <answer>{tasks[0].answer}</answer>"
    result, turns, score = await played(store, section, tasks[0], said)
    assert result == RolloutResult("answered", tasks[0].answer, reward=1.0)
    assert (score.scorer, score.value) == ("reasoning_gym:leg_counting", 1.0)
    assert [message["role"] for message in turns[0].added_messages] == ["system", "user"]
    assert turns[0].added_messages[1]["content"] == tasks[0].query


async def test_a_question_without_an_answer_earns_nothing(store: TrajectoryStore) -> None:
    section = data("reasoning_gym:leg_counting?size=1")
    result, _, score = await played(store, section, tasks_of(section)[0], "I do not know.")
    assert result == RolloutResult("no_answer", reward=0.0)
    assert score.value == 0.0


def test_held_out_tasks_are_others_and_the_same_in_every_evaluation() -> None:
    section = data(
        "reasoning_gym:leg_counting?size=20", eval_env="reasoning_gym:leg_counting?size=20"
    )
    trained = {task.query for task in tasks_of(section, seed=42)}
    first, second = (eval_tasks(section, version) for version in (0, 7))
    assert [task.order for task in first] == list(range(-20, 0))
    assert [task.query for task in first] == [task.query for task in second]
    assert trained.isdisjoint(task.query for task in first)


def guesser(number: int) -> tuple[str, ...]:
    return tuple(f"[{guess}]" for guess in range(1, number + 1))


async def test_a_game_of_textarena_is_a_conversation_and_its_outcome_the_reward(
    store: TrajectoryStore,
) -> None:
    env = "textarena:GuessTheNumber-v0?size=2&max_number=3&max_turns=5"
    section = data(env)
    task = tasks_of(section)[0]
    number = _secret(section, task)
    result, turns, score = await played(store, section, task, *guesser(number))
    assert result.reward == 1.0
    assert result.metrics == {"moves": float(number), "invalid_move": 0.0}
    assert (score.scorer, score.value) == ("textarena:GuessTheNumber-v0", 1.0)
    assert turns[0].added_messages[0]["content"] == task.query
    said = [turn.added_messages[0]["content"] for turn in turns[1:]]
    assert said == ["The target number is higher."] * (number - 1)
    assert [turn.parent for turn in turns] == [None, *range(number - 1)]


def _secret(section: DataSection, task: EnvironmentTask) -> int:
    """Find the number of a game as the game's own package draws it."""
    program = (
        "import textarena as ta; g = ta.make(env_id='GuessTheNumber-v0', max_number=3, max_turns=5);"
        f"g.reset(num_players=1, seed={task.args['seed'] + task.row});"
        "print(g.env.env.game_number)"
    )
    done = subprocess.run(
        [str(section.env_python), "-c", program], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("category", ["live_simple", "parallel", "irrelevance", "multi_turn_base"])
async def test_the_calls_that_the_model_writes_are_what_the_leaderboard_checks(
    store: TrajectoryStore, category: str
) -> None:
    section = data(f"bfcl:{category}?size=20")
    games = leaderboard_games(str(section.env), section.env_python)
    number, score, oracle = min(games, key=lambda game: len(game[2].messages))
    said = [
        "\n".join(
            tool_call(call["function"]["name"], **json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        )
        or message["content"]
        for message in oracle.messages
        if message["role"] == "assistant"
    ]
    (task,) = (task for task in tasks_of(section) if task.dataset_id == number)
    result, turns, stored = await played(store, section, task, *said)
    assert (result.outcome, result.reward, stored.value) == ("answered", 1.0, score)
    assert (len(turns), task.tags) == (len(said), (category,))
    assert turns[0].tools


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a task set on the path."""
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{OPENENV_SERVER.parent}")
    variables = index_variables(python_with("verifiers"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return {"env_variables": tuple(variables)}


async def test_the_rubric_of_verifiers_is_the_score_and_its_parts_are_metrics(
    store: TrajectoryStore, tasksets: dict[str, Any]
) -> None:
    section = data("verifiers:sums_taskset?size=3", shuffle=False, **tasksets)
    tasks = tasks_of(section)
    assert [(task.query, task.answer) for task in tasks] == [
        (f"{n} + 1 = ?", str(n + 1)) for n in range(3)
    ]
    result, turns, score = await played(store, section, tasks[1], "2")
    assert (result.outcome, result.final_answer, result.reward) == ("answered", "2", 1.5)
    assert result.metrics == {"right": 1.0, "short": 0.5, "length": 1.0}
    assert (score.scorer, score.value) == ("verifiers:sums_taskset", 1.5)
    assert len(turns) == 1


async def test_an_environment_of_verifiers_that_plays_the_user_has_the_policy_in_its_own_seat(
    store: TrajectoryStore, tasksets: dict[str, Any]
) -> None:
    section = data("verifiers:guesses_taskset?size=2", shuffle=False, **tasksets)
    tasks = tasks_of(section)
    assert [task.query for task in tasks] == ["Guess from 1 to 3."] * 2
    result, turns, score = await played(store, section, tasks[0], "1", "3", "2")
    assert (result.outcome, result.final_answer, result.reward) == ("answered", "2", 1.0)
    assert (result.metrics["game_reward"], score.value) == (1.0, 1.0)
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.added_messages[-1]["content"] for turn in turns[1:]] == ["No.", "No."]


BIDS = {
    "You are left.": "1",
    "Right bids 4": "3",
    "You are right.": "4",
    "You are the referee.": "Right won.",
    "Bid a number.": "4",
}


def bid(prompt: str) -> str:
    """Return what the seat says to the last question in its prompt."""
    return BIDS[max(BIDS, key=prompt.rfind)]


async def dueled(store: TrajectoryStore, section: DataSection, task: EnvironmentTask) -> Played:
    """Play a task whose seats may speak at once; every id must be where it belongs."""
    with serve_script(Renderer.load(MODEL_DIR), bid) as engine:
        result, turns, score = await sampled(store, section, task, engine)
        assert sorted(turn.output_ids.tolist() for turn in turns) == sorted(
            engine.reply_ids(turn.output_text) for turn in turns
        )
    return result, turns, score


@pytest.mark.parametrize(
    ("way", "seats", "reward"),
    [
        ("", [Seat(name="left", reward=4.0), Seat(name="right", reward=4.0)], 4.0),
        ("right is silent", [Seat(name="left", reward=4.0)], 4.0),
        ("left is silent", [Seat(name="right", reward=4.0)], 4.0),
        ("right fails", [Seat(name="left", reward=4.0), Seat(name="right", trained=False)], 4.0),
    ],
)
async def test_a_seat_that_fails_or_never_speaks_spoils_no_others_reward(
    store: TrajectoryStore, tasksets: dict[str, Any], way: str, seats: list[Seat], reward: float
) -> None:
    section = data(f"verifiers:odd_duel_taskset?size=1&way={way}", shuffle=False, **tasksets)
    (task,) = tasks_of(section)
    result, turns, _ = await dueled(store, section, task)
    assert [turn.seat for turn in turns] == seats
    assert result.reward == reward


async def test_a_seats_reward_that_is_no_number_ends_the_attempt_with_its_name(
    store: TrajectoryStore, tasksets: dict[str, Any]
) -> None:
    section = data("verifiers:odd_duel_taskset?size=1&way=no number", shuffle=False, **tasksets)
    (task,) = tasks_of(section)
    with pytest.raises(AgentError, match="is nan, not a finite number"):
        await dueled(store, section, task)


async def test_every_seat_of_an_environment_of_verifiers_has_its_calls_and_its_reward(
    store: TrajectoryStore, tasksets: dict[str, Any]
) -> None:
    section = data("verifiers:duel_taskset?size=1", shuffle=False, **tasksets)
    (task,) = tasks_of(section)
    result, turns, score = await dueled(store, section, task)
    assert sorted(turn.output_text for turn in turns) == ["1", "3", "4", "Right won."]
    # Left and right ask at once: their turns come in any order, each in a tree of its own.
    by_seat: dict[str, list[DispatchedSamplingTask]] = {}
    for turn in turns:
        assert turn.seat is not None
        by_seat.setdefault(turn.seat.name, []).append(turn)
    assert {name: len(calls) for name, calls in by_seat.items()} == {
        "left": 2,
        "right": 1,
        "referee": 1,
    }
    assert {turn.seat for turn in by_seat["left"]} == {Seat(name="left", reward=3.0)}
    assert {turn.seat for turn in by_seat["right"]} == {Seat(name="right", reward=4.0)}
    assert {turn.seat for turn in by_seat["referee"]} == {Seat(name="referee", trained=False)}
    first, second = by_seat["left"]
    assert (first.parent, second.parent) == (None, first.index)
    assert [calls[0].parent for calls in by_seat.values()] == [None] * 3
    assert (result.final_answer, result.reward, score.value) == ("3", 3.5, 3.5)
    assert score.seats_keep_rewards
    assert result.metrics == {
        "bid_left": 3.0,
        "bid_right": 4.0,
        "reward_left": 3.0,
        "reward_right": 4.0,
    }


async def test_steps_of_an_openenv_server_are_rewards_of_the_turns(store: TrajectoryStore) -> None:
    server: list[str | Path] = [python_with("openenv"), OPENENV_SERVER, "{port}", "1"]
    with listening_process(server) as url:
        section = data(f"openenv:{url}?size=2&seed=5", shuffle=False)
        task = tasks_of(section)[0]
        number = Random(5).randint(1, 3)
        wrong = 3 if number == 1 else 1
        said = ("hm", f'{{"number": {wrong}}}', str(number))
        result, turns, score = await played(store, section, task, *said)
    assert (result.reward, result.metrics) == (1.0, {"return": 0.75, "actions": 3.0})
    assert [turn.reward for turn in turns] == [0.0, -0.25, None]
    assert score.value == 1.0
    assert "that is no action of the schema" in turns[1].added_messages[0]["content"]


async def test_the_tools_of_an_openenv_server_are_tools_of_the_policy(
    store: TrajectoryStore,
) -> None:
    server: list[str | Path] = [python_with("openenv"), OPENENV_TOOL_SERVER, "{port}"]
    with listening_process(server) as url:
        section = data(f"openenv:{url}?size=2&seed=5", shuffle=False)
        number = Random(5).randint(1, 3)
        guesses = ("many", 3 if number == 1 else 1, number)
        said = [tool_call("guess", number=guess) for guess in guesses]
        result, turns, score = await played(store, section, tasks_of(section)[0], *said)
    assert [spec["function"]["name"] for spec in turns[0].tools] == ["guess"]
    assert turns[0].tools[0]["function"]["description"] == "Guess the number."
    assert (result.outcome, result.final_answer) == ("answered", f'guess({{"number": {number}}})')
    assert (result.reward, result.metrics) == (1.0, {"return": 0.75, "actions": 3.0})
    assert [turn.reward for turn in turns] == [None, -0.25, None]
    told = [result.content for turn in turns for result in turn.tool_results]
    assert "valid integer" in told[0]
    assert told[1:] == ["wrong"]
    assert score.value == 1.0


async def test_an_answer_without_a_call_ends_the_episode_of_a_tool_server(
    store: TrajectoryStore,
) -> None:
    server: list[str | Path] = [python_with("openenv"), OPENENV_TOOL_SERVER, "{port}"]
    with listening_process(server) as url:
        section = data(f"openenv:{url}?size=1&seed=5", shuffle=False)
        wrong = 3 if Random(5).randint(1, 3) == 1 else 1
        said = (tool_call("guess", number=wrong), "I give up.")
        result, turns, _ = await played(store, section, tasks_of(section)[0], *said)
    assert (result.final_answer, result.reward) == ("I give up.", 0.0)
    assert [turn.reward for turn in turns] == [-0.25, None]


async def test_what_steps_have_paid_stays_when_the_policys_turns_are_used_up(
    store: TrajectoryStore,
) -> None:
    server: list[str | Path] = [python_with("openenv"), OPENENV_SERVER, "{port}", "1"]
    with listening_process(server) as url:
        section = data(f"openenv:{url}?size=1&seed=5", shuffle=False)
        wrong = 3 if Random(5).randint(1, 3) == 1 else 1
        said = (f'{{"number": {wrong}}}',) * 5
        result, turns, score = await played(store, section, tasks_of(section)[0], *said)
    assert (result.outcome, result.reward, score.value) == ("turns_limit", -0.25, -0.25)
    assert [turn.reward for turn in turns] == [-0.25] * 4 + [None]


async def test_a_full_openenv_server_is_waited_for(store: TrajectoryStore) -> None:
    server: list[str | Path] = [python_with("openenv"), OPENENV_SERVER, "{port}", "1"]
    renderer = Renderer.load(MODEL_DIR)
    with listening_process(server) as url:
        section = data(f"openenv:{url}?size=3&seed=5", shuffle=False)
        tasks = tasks_of(section)
        with serve_script(renderer, guess_after) as engine:
            await begin_run(store, engine, *tasks)
            async with open_stage(store, engine) as stage:
                with EnvironmentProcesses.open(section, stage.endpoints) as environments:
                    samplers = []
                    for _ in tasks:
                        record, task = await claim(store)
                        assert isinstance(task, EnvironmentTask)
                        samplers.append(environments.sampler(task, record, stage.context))
                    ended = await asyncio.gather(*(sampler.run() for sampler in samplers))
    assert [result.reward for result in ended] == [1.0] * 3


def guess_after(prompt: str) -> str:
    """Return the first number that was not wrong yet."""
    return str(1 + prompt.count("wrong"))


async def test_a_policy_works_in_the_shell_of_a_harbor_task_and_its_tests_pay(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    write_task(tmp_path / "hello")
    section = DataSection(env=f"harbor:{tmp_path}?runtime=process")
    (task,) = tasks_of(section)
    assert (task.query, task.tags) == ("Write hello into greeting.txt.", ("files", "easy"))
    said = (tool_call("bash", command="echo $GREETING > greeting.txt"), tool_call("bash"), "Done.")
    result, turns, score = await played(store, section, task, *said)
    assert (result.outcome, result.final_answer, result.reward) == ("answered", "Done.", 1.0)
    assert result.metrics == {"commands": 2.0}
    assert score.value == 1.0
    assert "wrong call" in turns[1].tool_results[0].content


async def test_a_harbor_task_is_paid_when_the_policys_turns_are_used_up(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    write_task(tmp_path / "hello")
    section = DataSection(env=f"harbor:{tmp_path}?runtime=process")
    (task,) = tasks_of(section)
    said = [tool_call("bash", command="echo hello > greeting.txt")] * 5
    result, _, score = await played(store, section, task, *said)
    assert (result.outcome, result.reward, score.value) == ("turns_limit", 1.0, 1.0)


def test_a_game_is_the_same_however_many_begin_at_once() -> None:
    env = "textarena:GuessTheNumber-v0?size=8"
    uri = EnvironmentUri.parse(env)
    with (
        EnvironmentProcess(uri, data(env)) as environment,
        ThreadPoolExecutor(8) as threads,
    ):
        assert environment.size() == 8
        listed: Callable[[int], Any] = lambda _: environment.rows(range(8))  # noqa: E731
        assert len({json.dumps(rows) for rows in threads.map(listed, range(16))}) == 1


async def test_an_environment_that_dies_ends_the_attempt_and_not_the_sampler(
    store: TrajectoryStore,
) -> None:
    section = data("textarena:GuessTheNumber-v0?size=1&max_number=3")
    (task,) = tasks_of(section)
    renderer = Renderer.load(MODEL_DIR)
    with serve_script(renderer, replies("[9]")) as engine:
        await begin_run(store, engine, task)
        async with open_stage(store, engine) as stage:
            with EnvironmentProcesses.open(section, stage.endpoints) as environments:
                record, _ = await claim(store)
                environments.process_of(task)._process._process.kill()
                with pytest.raises(AgentError, match=r"the process of textarena:Guess.* SIGKILL"):
                    await environments.sampler(task, record, stage.context).run()
                again = environments.sampler(task, record, stage.context)
                assert (await again.run()).reward is not None
