"""GPUs by number, as `--trainer_gpus 0-3 --inference_gpus 4,5` name them."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_NUMBER_OR_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def expanded(given: Any) -> Any:
    """Return the numbers in `0-3`, `0,2,5` or a list of either."""
    parts = given if isinstance(given, list | tuple) else [given]
    numbers: list[int] = []
    for part in (str(part).strip() for part in parts):
        found = _NUMBER_OR_RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first:
            raise PydanticCustomError(
                "gpus", "expected numbers and ranges of GPUs, such as 0-3 or 0,2,5"
            )
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise PydanticCustomError("gpus", "a GPU occurs twice")
    return tuple(numbers)


GpuList = Annotated[tuple[int, ...], BeforeValidator(expanded)]


def in_words(numbers: Sequence[int]) -> str:
    """Return numbers in the format of the flags: `0-3,6`."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(members) for _, members in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
