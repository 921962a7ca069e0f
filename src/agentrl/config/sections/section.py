"""What all sections have in common."""

from pydantic import BaseModel, ConfigDict


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
