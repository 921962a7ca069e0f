import pytest

from agentrl.runtime.retries import retried


class Attempts:
    """Fails with each of the errors in turn, then returns how often it was called."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = [*errors]
        self.num_calls = 0

    async def __call__(self) -> int:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.num_calls


@pytest.mark.parametrize("num_failures", [0, 1, 2])
async def test_an_attempt_is_repeated_until_it_succeeds(num_failures: int) -> None:
    attempts = Attempts(*[OSError() for _ in range(num_failures)])
    assert await retried(attempts, on=OSError, pauses=(0.0, 0.0)) == num_failures + 1


async def test_the_last_error_is_raised_and_others_at_once() -> None:
    attempts = Attempts(OSError("first"), OSError("second"), OSError("third"))
    with pytest.raises(OSError, match="second"):
        await retried(attempts, on=(OSError, KeyError), pauses=(0.0,))
    assert attempts.num_calls == 2
    with pytest.raises(KeyError):
        await retried(Attempts(KeyError()), on=OSError, pauses=(0.0, 0.0))
