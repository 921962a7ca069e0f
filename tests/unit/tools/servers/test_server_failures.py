import asyncio

import pytest

from agentrl.errors import ToolError
from agentrl.tools.servers.server_failures import CircuitBreaker


def breaker(**options: float) -> CircuitBreaker:
    given = {"seconds": 0.01, "patience": 5.0, **options}
    return CircuitBreaker("server x", threshold=2, **given)


async def fail(circuit: CircuitBreaker, times: int = 2) -> None:
    for _ in range(times):
        await circuit.admit()
        circuit.settle(healthy=False)


def is_open(circuit: CircuitBreaker) -> bool:
    """Look anew: what was asserted before does not hold for ever."""
    return circuit.is_open


async def test_failures_in_a_row_open_the_circuit_and_a_success_closes_it() -> None:
    circuit = breaker()
    await fail(circuit, 1)
    await circuit.admit()
    circuit.settle(healthy=True)
    await fail(circuit, 1)
    assert not is_open(circuit)
    await fail(circuit, 1)
    assert is_open(circuit)
    await circuit.admit()
    circuit.settle(healthy=True)
    assert not is_open(circuit)


async def test_one_caller_tries_and_the_others_wait_for_what_it_finds() -> None:
    circuit = breaker()
    await fail(circuit)
    await circuit.admit()
    waiting = [asyncio.create_task(circuit.admit()) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    circuit.settle(healthy=True)
    await asyncio.gather(*waiting)


async def test_a_call_without_an_outcome_hands_the_try_on() -> None:
    circuit = breaker()
    await fail(circuit)
    await circuit.admit()
    waiting = asyncio.create_task(circuit.admit())
    await asyncio.wait([waiting], timeout=0.05)
    circuit.settle(healthy=None)
    await waiting
    assert circuit.is_open


async def test_patience_ends() -> None:
    circuit = breaker(seconds=60.0, patience=0.05)
    await fail(circuit)
    with pytest.raises(ToolError, match="server x has been down for 0 s"):
        await circuit.admit()
