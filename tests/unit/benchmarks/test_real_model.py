"""What the benchmark of a pretrained model keeps of its parts."""

from typing import Any

from real_model import wall_ratios


def part(start: float, step_seconds: float, rewards: list[float]) -> dict[str, Any]:
    steps = [
        {"reward_mean": reward, "time": start + step_seconds * number}
        for number, reward in enumerate(rewards, 1)
    ]
    return {"started": start, "steps": steps}


def test_parts_are_compared_at_the_highest_reward_that_both_reach() -> None:
    rows = {
        "turns": part(1000.0, 2.0, [0.2] * 5 + [0.7] * 5),
        "sharing": part(2000.0, 3.0, [0.2] * 5 + [0.3] * 5),
        "trl": part(3000.0, 10.0, [0.2] * 5 + [0.45] * 5),
        "cpu": part(4000.0, 1.0, [0.9] * 4),
    }
    assert wall_ratios(rows) == {
        # The mean of five is 0.45 or more at 0.2 * 2 + 0.7 * 3, the eighth step.
        "turns": {"reward": 0.45, "seconds": 16.0, "trl_seconds": 100.0, "ratio": 0.16},
        "sharing": {"reward": 0.3, "seconds": 30.0, "trl_seconds": 70.0, "ratio": 0.429},
    }


def test_without_trl_there_is_nothing_to_compare_with() -> None:
    assert wall_ratios({"turns": part(0.0, 1.0, [0.5] * 5)}) == {}


def test_a_part_that_went_on_from_an_earlier_call_is_not_compared() -> None:
    rows = {"turns": part(0.0, 1.0, [0.5] * 5), "trl": part(0.0, 1.0, [0.5] * 5)}
    rows["turns"]["started"] = 2.5
    assert wall_ratios(rows) == {}
