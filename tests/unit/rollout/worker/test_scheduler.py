"""How samplers of AgentRL's original are told what is called otherwise here."""

import pytest

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.rollout import AsyncSampler, MCPSampler, SamplingScheduler


class Settings:
    """The arguments of another program."""


async def test_a_scheduler_takes_the_flags_of_its_process_alone() -> None:
    SamplingScheduler(config=RootConfig(), sampler_class=MCPSampler, dataset=[], split="train")
    with pytest.raises(ConfigError, match=r"config is a Settings; pass .*\.parse_flags\(sys"):
        SamplingScheduler(config=Settings(), sampler_class=MCPSampler)  # type: ignore[arg-type]


async def test_the_originals_call_of_the_model_names_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"await self\.generate\(conversation\)"):
        await AsyncSampler.create_chat_completions(None, [], tools=[])  # type: ignore[arg-type]
