"""Field types and the base class of all stored documents."""

from datetime import UTC, datetime
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict

Message = dict[str, Any]
"""One chat message in OpenAI form: `role`, `content`, and the role's further fields."""


def utc_now() -> datetime:
    """Return the current time as an aware UTC datetime with millisecond precision (BSON's)."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def _to_int32(value: object) -> np.ndarray:
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype="<i4")
    return np.asarray(value, dtype=np.int32)


def _to_float32(value: object) -> np.ndarray:
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype="<f4")
    return np.asarray(value, dtype=np.float32)


TokenIds = Annotated[np.ndarray, BeforeValidator(_to_int32)]
"""Token ids, int32 [T]. Lists, and the bytes of documents, are accepted and converted."""

Logprobs = Annotated[np.ndarray, BeforeValidator(_to_float32)]
"""Natural-log probabilities, float32 [T]. Accepted as `TokenIds` are."""


class Value(BaseModel):
    """A frozen value.

    Keys that this version does not know are ignored, so that a document which a person annotated
    in Compass still loads.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)
