"""Bounds of the sampling parameters, the same for flags, live controls and servers.

A server refuses a request with other values, so whatever accepted them would make every rollout
fail.
"""

from typing import Annotated

from pydantic import Field

Temperature = Annotated[float, Field(ge=0.0, le=1e6)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
TopK = Annotated[int, Field(ge=-1, le=1_000_000_000)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
TokenPenalty = Annotated[float, Field(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Field(ge=1e-6, le=2.0)]
MaxNewTokens = Annotated[int, Field(ge=1, le=1_000_000_000)]
