"""The base class of the configuration's sections."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError


class ConfigSection(BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, docstrings become help texts."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _check_integer_range(cls, value: Any) -> Any:
        """Refuse integers beyond 64 bits, which the database cannot store."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise PydanticCustomError("too_large", "Input should have at most 18 digits")
        return value
