"""Weights that come over broadcast groups, as SGLang takes them."""

from collections.abc import Sequence

from agentrl.distributed.broadcast import BroadcastGroup, Seat, take_seat
from agentrl.errors import BroadcastError, InferenceError
from agentrl.inference.engine.weights.weight_receiver import Landing

_JOIN_SECONDS = 300.0
_RECEIVE_SECONDS = 1800.0
"""What SGLang waits at most; a sender that ends closes the connection before."""


class BroadcastReceiver:
    """The groups that an engine is in."""

    def __init__(self) -> None:
        self._groups: dict[str, BroadcastGroup] = {}

    async def join(self, name: str, seat: Seat) -> None:
        """Join a group; returns when all others are there.

        Raises:
            InferenceError: they did not come.
        """
        try:
            group = await take_seat(seat, name, "gloo", _JOIN_SECONDS)
        except BroadcastError as error:
            raise InferenceError(str(error)) from error
        self._groups[name] = group

    def leave(self, name: str) -> bool:
        """Leave a group; False when this engine is in none of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.leave()
        return group is not None

    def check(self, name: str) -> None:
        """Check that this engine is in a group.

        Raises:
            InferenceError: it is not.
        """
        if name not in self._groups:
            raise InferenceError(f"Failed to receive weights: the group {name} is not known here")

    async def receive(self, name: str, landings: Sequence[Landing]) -> None:
        """Receive announced tensors over a group, each to where it belongs.

        Raises:
            InferenceError: they did not come, and never will over this group; or some are not
                finite.
        """
        self.check(name)
        problems: list[str] = []

        def arrived(number: int) -> None:
            problem = landings[number].settle()
            if problem is not None:
                problems.append(problem)

        buffers = [landing.buffer for landing in landings]
        try:
            await self._groups[name].broadcast(buffers, _RECEIVE_SECONDS, arrived)
        except BroadcastError as error:
            self._groups[name].leave()
            raise InferenceError(f"Failed to receive weights: {error}") from error
        if problems:
            raise InferenceError(problems[0])
