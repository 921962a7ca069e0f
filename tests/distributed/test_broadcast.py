"""Weights of a sharded trainer, broadcast to servers while it goes on."""

import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from harness.processes import engine_process
from support.command_lines import words_of
from support.engines import Oracle, prompt, request
from support.training import Player, train_tasks

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.schema import InferenceService
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.checkpoint import latest_checkpoint

pytestmark = pytest.mark.distributed

NUM_STEPS = 2


@pytest.mark.parametrize("mesh", ["", "--tp_size=2", "--pp_size=2"])
async def test_two_ranks_broadcast_to_two_servers(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path, mesh: str
) -> None:
    name = f"broadcast_{uuid.uuid4().hex[:8]}"
    uri = mongod.uri(name)
    output = tmp_path / "output"
    flags = {
        "run_name": name,
        "output_dir": output,
        "logs_dir": tmp_path / "logs",
        "db_connection_string": uri,
        "model_name_or_path": model_path,
        "enable_sampling": "false",
        "num_generations": 3,
        "groups_per_step": 2,
        "max_steps": NUM_STEPS,
        "save_steps": 100,
        "max_staleness": 10,
        "trainer_threads": 1,
        "weight_sync": "distributed",
        "weight_sync_bucket_mb": 1,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "agentrl", "train"]
    command += words_of(flags, tmp_path)
    command += [mesh] if mesh else []
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(4, 3))
        await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 4)
        with ExitStack() as stack:
            urls = [stack.enter_context(engine_process(model_path)) for _ in range(2)]
            for number, url in enumerate(urls):
                await store.services.register(
                    InferenceService(
                        id=str(number), base_url=url, backend="embedded", model_path="m"
                    )
                )
            log = stack.enter_context((tmp_path / "trainer.log").open("wb"))
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=200, check=False
            ).returncode
            text = (tmp_path / "trainer.log").read_text()
            assert code == 0, text[-3000:]
            checkpoint = latest_checkpoint(output)
            assert checkpoint is not None
            assert checkpoint.step == NUM_STEPS
            for url in urls:
                async with SGLangClient(url) as client:
                    got = await client.generate(request(5))
                assert [span.version for span in got.version_spans] == [NUM_STEPS]
                expected = Oracle().logprobs(checkpoint.model_path, prompt(5), got.output_ids)
                np.testing.assert_allclose(got.output_logprobs, expected, atol=1e-4)
        policies = {policy.version: policy for policy in await store.policies.all()}
    assert all(policy.is_written and policy.checksum for policy in policies.values())
