from agentrl.store import TrajectoryStore


def steps(*numbers: int, loss: float = 0.5) -> list[dict[str, float]]:
    return [{"step": number, "loss": loss, "kl": 0.1} for number in numbers]


async def test_figures_come_back_in_order_and_as_asked_for(store: TrajectoryStore) -> None:
    for one in steps(1, 2, 10, 9):
        await store.figures.put_step("trainer", one)
    await store.figures.put_step("other", {"step": 3, "loss": 9.0})
    await store.figures.put_step("trainer", {"step": 2, "loss": 0.25})
    found = await store.figures.steps("trainer", ("loss",), after=1)
    assert found == [
        {"step": 2, "loss": 0.25},
        {"step": 9, "loss": 0.5},
        {"step": 10, "loss": 0.5},
    ]
    assert [one["step"] for one in await store.figures.last_steps("trainer", 2)] == [9, 10]
    assert await store.figures.step("trainer", 4) is None


async def test_a_resumed_trainer_forgets_lost_steps_and_adds_missing_ones(
    store: TrajectoryStore,
) -> None:
    for one in steps(1, 2, 4, 5):
        await store.figures.put_step("trainer", one)
    for version in (0, 5):
        await store.figures.put_evaluation("trainer", {"version": version, "reward_mean": 0.1})
    evaluations = [{"version": 0, "reward_mean": 0.1}]
    await store.figures.rewind("trainer", 3, steps(1, 2, 3), evaluations)
    assert [one["step"] for one in await store.figures.last_steps("trainer", 9)] == [1, 2, 3]
    assert [one["version"] for one in await store.figures.evaluations("trainer")] == [0]
