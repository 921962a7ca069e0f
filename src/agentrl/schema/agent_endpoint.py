"""Where an agent reaches its model. Every process that runs agents knows it, so it needs nothing."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AgentEndpoint:
    """The model of one rollout, as an OpenAI-compatible client wants to know it."""

    base_url: str
    """`http://host:port/s/<session>/v1`: every call to it belongs to this rollout."""
    model: str
    """Name of the trained model."""
    api_key: str = field(repr=False)
    forwards: bool = False
    """Whether calls for other models may be sent there too, to be forwarded and recorded."""

    @property
    def anthropic_base_url(self) -> str:
        """The same for Anthropic's clients, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")
