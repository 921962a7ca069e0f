"""`AgentEndpoint`: how an agent reaches its model; used by every process that runs agents."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AgentEndpoint:
    """The model of one rollout, as an OpenAI-compatible client needs it."""

    base_url: str
    """`http://host:port/s/<session>/v1`: every call to it belongs to this rollout."""
    model: str
    """Name of the trained model."""
    api_key: str = field(repr=False)

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for Anthropic's clients, which append `/v1` themselves."""
        return self.base_url.removesuffix("/v1")
