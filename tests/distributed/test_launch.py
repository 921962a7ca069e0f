"""`agentrl train` on two machines, each with its own launcher: here both are this machine."""

import socket
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.training import Player, train_tasks

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.checkpoint import latest_checkpoint

pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).parents[2]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", "assets/fsdp2_dst.yml"]


def launcher(kind: str, node: int, port: int) -> list[str]:
    if kind == "accelerate":
        return [
            *ACCELERATE,
            *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(node)),
            *("--main_process_ip", "127.0.0.1", "--main_process_port", str(port)),
        ]
    return [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"),
        *("--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", str(port)),
    ]


@pytest.mark.parametrize("kind", ["torchrun", "accelerate"])
async def test_two_machines_train_one_run(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path, kind: str
) -> None:
    name = f"nodes_{uuid.uuid4().hex[:8]}"
    uri = mongod.uri(name)
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(2, 3))
        await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
        "max_steps": 1,
        "cp_size": 2,
        "trainer_threads": 1,
    }
    command = ["-m", "agentrl", "train"]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    with ExitStack() as stack:
        nodes = []
        for node in range(2):
            log = stack.enter_context((tmp_path / f"node{node}.log").open("wb"))
            argv = [sys.executable, *launcher(kind, node, port), *command]
            nodes.append(
                subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
            )
            stack.callback(nodes[-1].kill)
        codes = [node.wait(200) for node in nodes]
    logs = "".join(log.read_text() for log in sorted(tmp_path.rglob("*.log")))
    assert codes == [0, 0], logs[-3000:]
    checkpoint = latest_checkpoint(output)
    assert checkpoint is not None
    assert checkpoint.step == 1
