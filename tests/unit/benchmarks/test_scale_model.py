"""The arithmetic of a run's size, against values by hand, and its page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scale_model
from scale_model import WORKLOADS, Costs, Planned, Size, Workload, costs, page_row

ROOT = Path(__file__).parents[3]
STORED = json.loads((ROOT / "benchmarks/results/scale_sim.json").read_text())
RESULT, POINT = STORED["sizes"], STORED["point"]
COSTS = Costs(
    sampler_ms=2.0,
    mongod_ms=1.0,
    list_mongod_ms=(0.1, 0.001),
    list_sampler_ms=(0.2, 0.01),
    server_beat_ms=0.5,
    sampler_beat_ms=0.4,
    renewal_ms=0.1,
    claims_per_second=1000.0,
    control_call_ms=0.1,
    status_write_ms=0.3,
    read_bytes_per_second=100e6,
    bytes_per_token=10.0,
    prepare_ms=1.0,
    broadcast_ratio=2.0,
)
PLANNED = Planned(
    model="m",
    gpu="H100",
    trainer_seconds=1.0,
    tokens_per_second=1000.0,
    conversations=10,
    weight_bytes=2 * (256 << 20),
)
# 3,000 sampled tokens per record: 3 s of a server for 1 s of a trainer's GPU.
WORK = Workload(tokens=6000, turns=5)


def size(gpus: int, **changed: Any) -> Size:
    return Size(gpus, WORK, PLANNED, replace(COSTS, **changed))


def test_gpus_are_divided_so_that_both_sides_take_the_same_time() -> None:
    found = size(8)
    assert (found.trainer_gpus, found.servers, found.records) == (2, 6, 256)
    assert found.compute_seconds == pytest.approx(128.0)
    assert found.sample_seconds == pytest.approx(128.0)
    assert found.pace == pytest.approx(2.0)
    # However little a side has to do, it has a GPU.
    few = Size(8, WORK, replace(PLANNED, trainer_seconds=1e-6), COSTS)
    assert (few.trainer_gpus, few.servers) == (1, 7)


def test_a_step_is_what_the_trainer_does_one_after_the_other() -> None:
    found = size(8)
    # 256 records of 60 kB at 100 MB/s, and a millisecond each.
    assert found.rank0_seconds == pytest.approx(0.1536 + 0.256)
    # Four calls and two buckets of 0.1 ms, two writes of 0.3 ms, for each of six servers.
    assert found.control_seconds == pytest.approx(6 * 1.2e-3)
    assert found.publish_seconds == pytest.approx(2 * 2 * (256 << 20) / 10e9 + 6 * 1.2e-3)
    assert found.step_seconds == pytest.approx(
        128.0 + found.rank0_seconds + found.publish_seconds, rel=1e-9
    )
    assert found.rollouts_per_second == pytest.approx(256 / found.step_seconds)
    assert found.idle_share == pytest.approx(1 - 128 / found.step_seconds)


def test_the_batch_ends_growing_and_slow_groups_bound_the_steps() -> None:
    assert size(256).records == size(4096).records == 32 * 256
    found = size(4096)
    assert found.compute_seconds == pytest.approx(8.0)
    assert found.step_seconds >= found.group_seconds / (scale_model.STALENESS + 1)
    assert found.loads["staleness"] == pytest.approx(found.group_seconds / 4 / 8.0)
    # A turn takes as long as its tokens on a full server, and its tools.
    slower = Size(4096, WORK, replace(PLANNED, conversations=20), COSTS)
    assert slower.group_seconds > found.group_seconds
    assert Size(4096, replace(WORK, tools=0.0), PLANNED, COSTS).group_seconds < found.group_seconds


def test_mongod_carries_turns_and_the_fleet() -> None:
    found = size(4096)  # 1,024 rollouts a second of five turns; 3,072 servers
    assert found.turn_cores == pytest.approx(5.12)
    assert found.conversations == 30_720
    assert found.samplers == 120  # 256 rollouts each; turns alone would take 16
    lists = 120 * (0.1 + 3.072)
    beats = 3072 * 0.5
    reports = 120 * 0.4 / 2
    renewals = 30_720 * 0.1 / 10
    assert found.fleet_cores == pytest.approx((lists + beats + reports + renewals) / 1000)
    assert found.loads["mongod"] == pytest.approx((5.12 + found.fleet_cores) / (0.7 * 16))


@pytest.mark.parametrize(
    ("changed", "part", "shards"),
    [
        ({"claims_per_second": 0.5}, "claims", 4),
        ({"mongod_ms": 4000.0}, "mongod", 4),
        ({"prepare_ms": 1000.0}, "rank 0", 1),
        ({"broadcast_ratio": 10_000.0}, "publishing", 1),
    ],
)
def test_what_is_made_dear_is_full_first(changed: dict[str, float], part: str, shards: int) -> None:
    found = size(8, **changed)
    assert found.fullest == part
    assert found.loads[part] > 1
    assert found.row()["saturated"] == [part]
    assert found.shards == shards
    assert size(8).row()["saturated"] == []


def test_costs_are_those_of_the_committed_results(tmp_path: Path) -> None:
    found = costs("agent")
    turn = json.loads((scale_model.RESULTS / "turn_cost.json").read_text())["concurrencies"][-1]
    assert (found.sampler_ms, found.mongod_ms) == (turn["sampler_ms"], turn["mongod_ms"])
    fleet = json.loads((scale_model.RESULTS / "fleet_cost.json").read_text())
    base, slope = found.list_mongod_ms
    assert base + 2048 * slope == pytest.approx(fleet["service_list"]["2048"]["mongod_ms"], 1e-3)
    assert found.prepare_ms == fleet["prepare"]["agent"]


def test_the_result_is_what_its_own_costs_give() -> None:
    for name, rows in RESULT["rows"].items():
        planned = Planned(**RESULT["planned"][name])
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in RESULT["costs"][name].items()
        }
        found = [Size(row["gpus"], WORKLOADS[name], planned, Costs(**given)).row() for row in rows]
        assert found == rows


def test_the_page_says_what_the_result_says() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    for rows in RESULT["rows"].values():
        assert "\n".join(map(page_row, rows)) in page
    measured = POINT["turns_per_second"]
    assert f"{measured['predicted']:.0f} turns per second" in page
    assert f"{measured['measured']:.0f}" in page
