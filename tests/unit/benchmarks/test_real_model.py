"""What the benchmark of a pretrained model keeps of its parts."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import real_model
from real_model import play, wall_ratios

SLOW_TO_END = """
import json, pathlib, signal, sys, time
lines = pathlib.Path(sys.argv[1]).open("w")
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
for number in range(1, 1000):
    print(json.dumps({"step": number, "loss": 0.5, "time": time.time()}), file=lines, flush=True)
    time.sleep(0.1)
    if stop and sys.argv[2] == "ends":
        time.sleep(1)
        print(json.dumps({"step": 1000, "time": time.time()}), file=lines, flush=True)
        break
"""


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


def played(folder: Path, ending: str) -> tuple[int, dict[str, Any]]:
    (folder / "sft").mkdir()
    argv = [sys.executable, "-c", SLOW_TO_END, str(folder / "sft/metrics.jsonl"), ending]
    status = play(argv, "sft", folder, folder / "out.json", limit=2)
    return status, json.loads((folder / "out.json").read_text())["sft"]


def test_a_part_whose_time_is_over_ends_its_step_and_keeps_its_rows(tmp_path: Path) -> None:
    status, row = played(tmp_path, "ends")
    assert (status, row["exit_status"], row["was_cut_short"]) == (0, 0, True)
    assert row["steps"][0]["step"] == 1
    assert row["steps"][-1]["step"] == 1000


def test_a_part_that_does_not_end_is_killed_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "_STOP_SECONDS", 1)
    status, row = played(tmp_path, "ignores")
    assert (status, row["exit_status"]) == (1, -signal.SIGKILL)
    assert row["steps"]
