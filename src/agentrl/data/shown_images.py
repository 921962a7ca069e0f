"""`ShownImage`: an image among the tokens of a turn, and how many positions it takes there.

A stored turn holds one placeholder per image, as written by the chat template. The trainer computes
what the model reads instead: for every placeholder, the tokens around an image and one position for
each of its features. Works on arrays; does not decode images.

Shape legend: N tokens, K images among them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class ShownImage:
    """An image as a model reads it."""

    key: str
    """Two images are read identically exactly if their keys are equal."""
    data: bytes
    """The file."""
    processor: Mapping[str, Any]
    """Settings of the image processor that computes its pixels."""
    image_token_id: int
    num_positions: int
    """Features of the image: positions that hold its token."""
    grid: tuple[int, int] | None = None
    """Rows and columns of these positions if the model counts both (M-RoPE); None if it counts them
    like text.
    """
    is_whole: bool = False
    """Whether its tokens attend to one another in both directions."""
    before: tuple[int, ...] = ()
    """Tokens that the model's processor inserts before them, in place of the placeholder."""
    after: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of tokens that replace the placeholder."""
        return len(self.before) + self.num_positions + len(self.after)

    @property
    def token_ids(self) -> np.ndarray:
        """These tokens, int32."""
        own = [self.image_token_id] * self.num_positions
        return np.array([*self.before, *own, *self.after], dtype=np.int32)


@dataclass(frozen=True)
class PlacedImage:
    """An image and its first position on a path."""

    start: int
    image: ShownImage

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.start + self.image.num_positions


@dataclass(frozen=True, eq=False)
class ImageBook:
    """The images that turns show."""

    images: Mapping[tuple[str, str], ShownImage] = field(default_factory=dict)
    """By their stored address and `processor_key`."""
    token_id: int | None = None
    """The token of images; None for a text-only model."""

    def stray_tokens(self, turn_ids: np.ndarray, placed: Sequence[PlacedImage]) -> int:
        """Return how many image tokens a turn has that belong to no image."""
        if self.token_id is None:
            return 0
        return int((turn_ids == self.token_id).sum()) - sum(
            placed_image.image.num_positions for placed_image in placed
        )


def processor_key(processor: Mapping[str, Any]) -> str:
    """Return a key that identifies the settings of an image processor."""
    return hashlib.sha256(json.dumps(processor, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images among the tokens of a row."""

    images: tuple[ShownImage, ...]
    """Each once, however often it is shown."""
    starts: np.ndarray
    """int64 [K], first token of each that is shown, rising."""
    which: np.ndarray
    """int64 [K], index of each in `images`."""

    @classmethod
    def of(cls, placed: Sequence[tuple[int, ShownImage]]) -> "RowImages | None":
        """Return the images at these tokens, in the order of the row; None if there are none."""
        distinct = {image.key: image for _, image in placed}
        number = {key: index for index, key in enumerate(distinct)}
        if not placed:
            return None
        return cls(
            images=tuple(distinct.values()),
            starts=np.array([start for start, _ in placed], dtype=np.int64),
            which=np.array([number[image.key] for _, image in placed], dtype=np.int64),
        )

    @property
    def placed(self) -> list[tuple[int, ShownImage]]:
        """The first token of each shown image, and the image."""
        return [
            (start, self.images[which])
            for start, which in zip(self.starts.tolist(), self.which.tolist(), strict=True)
        ]

    @property
    def spans(self) -> np.ndarray:
        """The first token and the one after the last of each shown image, int64 [K, 2]."""
        lengths = np.array([image.num_positions for image in self.images], dtype=np.int64)
        return np.stack([self.starts, self.starts + lengths[self.which]], axis=1)

    @property
    def whole_spans(self) -> np.ndarray:
        """The spans of those whose tokens attend to one another."""
        is_whole = np.array([image.is_whole for image in self.images], dtype=bool)
        spans: np.ndarray = self.spans[is_whole[self.which]]
        return spans


def expanded(
    token_ids: np.ndarray, places: Sequence[tuple[int, ShownImage]]
) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    """Return tokens, int32, with each placeholder replaced by its image; places rise."""
    if not places:
        return token_ids, ()
    parts: list[np.ndarray] = []
    placed: list[PlacedImage] = []
    copied = length = 0
    for place, image in places:
        parts += [token_ids[copied:place], image.token_ids]
        length += place - copied + len(image.before)
        placed.append(PlacedImage(length, image))
        length += image.num_positions + len(image.after)
        copied = place + 1
    return np.concatenate([*parts, token_ids[copied:]]).astype(np.int32), tuple(placed)


def rotary_positions(length: int, images: Sequence[PlacedImage]) -> np.ndarray:
    """Return the position of each token of a path, as time, row and column, int64 [3, length].

    An image is one moment in time, its rows and columns count from there, and the tokens after it
    continue from the larger of the two (M-RoPE of Qwen2-VL, arXiv 2409.12191). For text, all three
    are equal.
    """
    positions = np.empty((3, length), dtype=np.int64)
    written = next_position = 0
    for placed in images:
        if placed.start >= length:
            break
        assert placed.image.grid is not None, "all images of a model are counted alike"
        rows, columns = placed.image.grid
        first = next_position + placed.start - written
        positions[:, written : placed.start] = np.arange(next_position, first)
        own = np.arange(min(placed.image.num_positions, length - placed.start))
        positions[:, placed.start : placed.start + len(own)] = first + np.stack(
            [np.zeros_like(own), own // columns, own % columns]
        )
        written, next_position = placed.start + len(own), first + max(rows, columns)
    positions[:, written:] = np.arange(next_position, next_position + length - written)
    return positions
