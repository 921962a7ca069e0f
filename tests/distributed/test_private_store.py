"""Ranks of one machine find each other through a file of their user, and nothing listens for them."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.patience import PATIENCE

from agentrl.config.loading import build_config
from agentrl.distributed.mesh import joined_ranks
from agentrl.errors import ConfigError
from agentrl.launcher.cluster.child_commands import RANK_VARIABLES, trainer_command

RANK = """
import os
import psutil
from agentrl.distributed.mesh import joined_ranks

def ports(process):
    return [one.laddr.ip for one in process.net_connections("tcp") if one.status == "LISTEN"]

with joined_ranks() as ranks:
    assert ranks.gather_all(ranks.rank) == [0, 1]
    launcher = psutil.Process(os.getppid())
    print("launcher", ports(launcher), "rank", len(ports(psutil.Process())))
    ranks.barrier()
"""


@pytest.mark.distributed
def test_no_store_of_ranks_listens(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    config = build_config({"num_processes": 2})
    argv = trainer_command(config.trainer, tmp_path / "config.yaml")
    ended = subprocess.run(
        [*argv[: argv.index("agentrl") - 1], str(tmp_path / "rank.py")],
        env={**os.environ, **RANK_VARIABLES, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    # A rank listens for the connections of its group alone.
    assert ended.stdout.count("launcher [] rank 1\n") == 2, ended.stdout
    folder = tmp_path / f"agentrl-ranks-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"agentrl-ranks-{os.getuid()}").symlink_to(tmp_path / "theirs")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is not yours; set TMPDIR"), joined_ranks():
        pass
    assert list((tmp_path / "theirs").iterdir()) == []
