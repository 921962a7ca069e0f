"""Which server a generation goes to, and when servers count as pressed."""

import heapq
import random
from collections import Counter
from datetime import timedelta

import pytest

from agentrl.inference.client.load_balancing import LoadBalancer, Pressure
from agentrl.schema import InferenceService, ServerLoad, ServiceStatus, utc_now

URLS = ("http://a", "http://b", "http://c")
START = utc_now()
CALM = {"num_running": 16, "num_waiting": 1, "token_usage": 0.5}
QUEUE = CALM | {"num_waiting": 5}
FULL = CALM | {"token_usage": 0.95}


def report(
    pressure: Pressure, second: int, *loads: dict[str, float], status: ServiceStatus = "up"
) -> None:
    """Let the servers report at a second."""
    pressure.note(
        [
            InferenceService(
                id=url,
                base_url=f"{url}/",
                backend="sglang",
                model_path="m",
                status=status,
                load=ServerLoad.model_validate(load | {"at": START + timedelta(seconds=second)}),
            )
            for url, load in zip(URLS, loads, strict=False)
        ]
    )


@pytest.mark.parametrize("load", [QUEUE, FULL])
def test_server_is_pressed_after_two_reports_of_a_queue_or_of_full_memory(
    load: dict[str, float],
) -> None:
    pressure = Pressure()
    report(pressure, 1, load, CALM)
    assert (pressure.is_pressed(URLS[0]), pressure.may_be_general) == (False, True)
    report(pressure, 1, load, CALM)  # the same report, read once more
    assert not pressure.is_pressed(URLS[0])
    report(pressure, 2, load, CALM)
    assert [pressure.is_pressed(url) for url in URLS] == [True, False, False]
    assert pressure.is_general  # half of those that tell
    report(pressure, 3, CALM, CALM)
    assert not pressure.is_pressed(URLS[0])
    assert pressure.num_reports == 3


def test_pressure_of_one_server_in_three_is_not_general() -> None:
    pressure = Pressure()
    for second in range(3):
        report(pressure, second, FULL, CALM, CALM)
    assert not pressure.is_general


def test_server_that_is_updated_is_not_judged() -> None:
    pressure = Pressure()
    report(pressure, 1, FULL)
    report(pressure, 2, FULL, status="updating")
    report(pressure, 3, FULL)
    assert not pressure.is_pressed(URLS[0])
    assert pressure.is_known


def test_servers_that_do_not_tell_are_never_pressed() -> None:
    pressure = Pressure()
    pressure.note([InferenceService(id="s", base_url="u", backend="sglang", model_path="m")])
    assert not pressure.is_known
    assert not pressure.is_general


def test_new_conversations_avoid_a_pressed_server_and_old_ones_wait_for_it_no_longer() -> None:
    pressure = Pressure()
    balance = LoadBalancer(pressure)
    a, b, _ = URLS
    balance.in_flight[b] = 5
    assert balance.choose("old", None, URLS[:2]) == a
    balance.in_flight.update({a: 3, b: -4})
    assert balance.choose("old", None, URLS[:2]) == a  # its history is worth a wait
    for second in range(2):
        report(pressure, second, FULL, CALM)
    assert balance.choose("old", None, URLS[:2]) == b
    balance.in_flight[a] = 0
    assert {balance.choose(f"new {n}", None, URLS[:2]) for n in range(20)} == {b}
    for second in range(2, 4):
        report(pressure, second, FULL, FULL)
    assert balance.choose("another", None, URLS[:2]) == a  # all are: the idlest


def test_conversation_leaves_a_server_that_is_far_busier_than_the_idlest() -> None:
    balance = LoadBalancer(Pressure())
    first = balance.choose("record", None, URLS)
    balance.in_flight[first] = 8
    assert balance.choose("record", None, URLS) == first
    balance.in_flight[first] = 9
    assert balance.choose("record", None, URLS) != first


@pytest.mark.parametrize("times_as_fast", [1.0, 2.0, 5.0])
def test_servers_get_work_in_proportion_to_their_speed(times_as_fast: float) -> None:
    """Conversations of four turns, one after the other in each of 32 places, on a virtual clock."""
    fast, slow = URLS[:2]
    seconds = {fast: 1.0, slow: times_as_fast}
    balance, random_ = LoadBalancer(Pressure()), random.Random(0)
    done: Counter[str] = Counter()
    ends: list[tuple[float, int, int, str]] = []  # time, place, turn, server

    def begin(now: float, place: int, turn: int) -> None:
        url = balance.choose(f"{place}/{turn // 4}", None, (fast, slow))
        balance.in_flight[url] += 1
        taken = seconds[url] * random_.uniform(0.5, 1.5)
        heapq.heappush(ends, (now + taken, place, turn, url))

    for place in range(32):
        begin(0.0, place, 0)
    while (event := heapq.heappop(ends))[0] < 200.0:
        now, place, turn, url = event
        balance.in_flight[url] -= 1
        done[url] += 1
        begin(now, place, turn + 1)
    assert done[fast] / done[slow] == pytest.approx(times_as_fast, rel=0.1)


def test_processes_agree_on_the_server_of_a_group() -> None:
    homes = [
        [LoadBalancer(Pressure()).choose(f"{process}/{n}", f"task {n}", URLS) for n in range(300)]
        for process in range(2)
    ]
    assert homes[0] == homes[1]
    assert min(Counter(homes[0]).values()) > 60


def test_server_gets_a_quarter_more_than_its_part_for_the_sake_of_a_group() -> None:
    balance = LoadBalancer(Pressure())
    for number in range(60):  # tries of one and the same question
        balance.in_flight[balance.choose(f"try {number}", "task", URLS)] += 1
    assert sorted(balance.in_flight.values())[1:] == [25, 25]
    spread = LoadBalancer(Pressure())
    for number in range(60):
        spread.in_flight[spread.choose(f"try {number}", f"task {number // 4}", URLS)] += 1
    assert max(spread.in_flight.values()) <= 26


def test_groups_stay_where_they_are_as_another_server_goes() -> None:
    before = {n: LoadBalancer(Pressure()).choose("k", f"task {n}", URLS) for n in range(100)}
    after = {n: LoadBalancer(Pressure()).choose("k", f"task {n}", URLS[:2]) for n in range(100)}
    moved = [n for n in before if before[n] != after[n]]
    assert all(before[n] == URLS[2] for n in moved)


def servers_of_a_group(*, are_groups: bool) -> float:
    """Play groups of 8 tries on 16 servers, 256 tries at a time, on a virtual clock.

    Returns:
        How many servers a group's tries came to, on average: each computes the question anew.
    """
    balance, random_ = LoadBalancer(Pressure()), random.Random(0)
    urls = [f"http://server{number}" for number in range(16)]
    ends: list[tuple[float, str]] = []
    met: set[tuple[int, str]] = set()
    now = 0.0
    for number in range(8 * 200):
        if len(ends) == 256:
            now, ended = heapq.heappop(ends)
            balance.in_flight[ended] -= 1
        group = number // 8
        url = balance.choose(f"try {number}", f"group {group}" if are_groups else None, urls)
        balance.in_flight[url] += 1
        assert balance.in_flight[url] <= 1.25 * 256 / 16 + 1
        met.add((group, url))
        heapq.heappush(ends, (now + random_.expovariate(1), url))
    return len(met) / 200


def test_tries_of_a_question_share_servers() -> None:
    assert servers_of_a_group(are_groups=False) > 6
    assert servers_of_a_group(are_groups=True) < 2.5
