"""How samplers of AgentRL's original are told what is called otherwise here."""

import pytest

from agentrl.config.sections import DataSection, RootConfig
from agentrl.errors import ConfigError
from agentrl.rollout import AsyncSampler, MCPSampler, SamplingScheduler
from agentrl.rollout.worker.scheduler import check_environments
from agentrl.schema import EnvironmentTask, Run
from agentrl.store import TrajectoryStore


class Settings:
    """The arguments of another program."""


async def test_a_scheduler_takes_the_flags_of_its_process_alone() -> None:
    SamplingScheduler(config=RootConfig(), sampler_class=MCPSampler, dataset=[], split="train")
    with pytest.raises(ConfigError, match=r"config is a Settings; pass .*\.parse_flags\(sys"):
        SamplingScheduler(config=Settings(), sampler_class=MCPSampler)  # type: ignore[arg-type]


async def test_the_originals_call_of_the_model_names_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"await self\.generate\(conversation\)"):
        await AsyncSampler.create_chat_completions(None, [], tools=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("is_imported", [False, True])
async def test_tasks_of_an_imported_run_open_no_environment_that_was_not_given(
    store: TrajectoryStore, is_imported: bool
) -> None:
    run = Run(name=store.database_name, imported_policies=() if is_imported else None)
    await store.runs.create(run)
    task = EnvironmentTask(id="train/0/q", query="q", env_id="harbor:/tmp/theirs", row=0)
    await store.tasks.add([task])
    await check_environments(store, DataSection(env="harbor:/tmp/theirs?runtime=process"))
    ours = DataSection(env="reasoning_gym:leg_counting")
    if not is_imported:
        await check_environments(store, ours)
        return
    with pytest.raises(ConfigError, match="start the run with --env harbor:/tmp/theirs"):
        await check_environments(store, ours)
