"""Weights that come over broadcast groups, as SGLang takes them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agentrl.distributed.broadcast import BroadcastGroup, Bucket, Seat, take_seat
from agentrl.errors import InferenceError, PublishError

_JOIN_SECONDS = 300.0
_RECEIVE_SECONDS = 1800.0
"""What SGLang waits at most; a sender that ends closes the connection before."""


@dataclass(frozen=True)
class Announced:
    """What is going to come over a group, in order."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    is_flattened: bool
    """One broadcast of all bytes; else one of every tensor."""


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
        except PublishError as error:
            raise InferenceError(str(error)) from error
        self._groups[name] = group

    def leave(self, name: str) -> bool:
        """Leave a group; False when this engine is in none of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.leave()
        return group is not None

    async def receive(self, announced: Announced) -> Mapping[str, torch.Tensor]:
        """Return the tensors that come over a group.

        Raises:
            InferenceError: they did not come; the group is of no use any more.
        """
        group = self._groups.get(announced.group)
        if group is None:
            raise InferenceError(f"the group {announced.group} is not known here")
        try:
            bucket = Bucket.empty(announced.names, announced.dtypes, announced.shapes)
            parts = [bucket.data]
            if not announced.is_flattened:
                parts = [tensor.view(-1).view(torch.uint8) for tensor in bucket.tensors().values()]
            for part in parts:
                await group.broadcast(part, _RECEIVE_SECONDS)
        except PublishError as error:
            raise InferenceError(str(error)) from error
        return bucket.tensors()
