"""Figures of real runs in trackers, and no secret anywhere near them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.scrape import scrape_until
from support.training import MakeConfig, Player, train_tasks

from agentrl.config.loading import build_config, write_config
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.runtime.ports import free_port
from agentrl.runtime.processes.signals import INTERRUPTED
from agentrl.runtime.telemetry.tracker_checks import check_trackers
from agentrl.store import TrajectoryStore
from agentrl.trainer.metrics.trackers import (
    Trackers,
    flat_figures,
    open_trackers,
    open_values,
)
from agentrl.trainer.rl.training_loop import lead

SECRET = "hunter2"
SECRETS = {
    "db_connection_string": f"mongodb://me:{SECRET}@db.example/run",
    "mcp_auth_token": SECRET,
    "inference_api_key": SECRET,
    "mcp_servers": json.dumps({"mcpServers": {"a": {"url": "http://x", "headers": {"k": SECRET}}}}),
    "tool_server_command": f"server --key {SECRET}",
    "sglang_args": f"--key {SECRET}",
}


def holds_secret(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_figures_are_flattened_and_what_is_no_number_is_left_out() -> None:
    figures = {"loss": 1.5, "seconds": {"publish": 2}, "skipped": "non_finite_loss"}
    assert flat_figures(figures) == {"loss": 1.5, "seconds/publish": 2}


def test_trackers_are_told_nothing_that_may_be_a_secret() -> None:
    config = build_config(
        {key: value for key, value in SECRETS.items() if "mcp_servers" not in key}
        | {"inference_backend": "sglang"}
    )
    values = open_values(config)
    assert values["learning_rate"] == config.trainer.learning_rate
    assert values["report_to"] == "[]"
    assert not {name for name in SECRETS if name in values}
    assert SECRET not in json.dumps(values)


def test_a_tracker_whose_package_is_missing_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install swanlab"):
        check_trackers(("console", "swanlab"))
    assert check_trackers(("none", "jsonl", "console")) == []


@pytest.mark.parametrize(
    ("name", "variable"), [("mlflow", "MLFLOW_TRACKING_URI"), ("trackio", "TRACKIO_SERVER_URL")]
)
def test_a_server_that_does_not_answer_is_refused_before_the_run(
    name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    port = free_port()
    monkeypatch.setenv(variable, f"http://me:{SECRET}@127.0.0.1:{port}/?write_token={SECRET}")
    with pytest.raises(ConfigError) as refused:
        check_trackers((name,))
    (line,) = str(refused.value).splitlines()
    expected = f"--report_to {name}: the server at http://127.0.0.1:{port} ({variable}) does not"
    assert line.startswith(expected)
    assert SECRET not in line
    monkeypatch.setenv(variable, "")
    assert check_trackers((name,)) == [name]


async def test_every_step_of_a_run_reaches_tensorboard(
    make_config: MakeConfig, store: TrajectoryStore, model_path: Path
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    await store.tasks.add(train_tasks(2, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 2)
    config = make_config(max_steps=2, groups_per_step=1, report_to="tensorboard,jsonl")
    result = await lead(config, Ranks(), stop=asyncio.Event())
    folder = result.output_path / "tensorboard"
    found = events.EventAccumulator(str(folder)).Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2]
    lines = (result.output_path / "metrics.jsonl").read_text().splitlines()
    for name in ("grad_norm", "ratio_max", "merge_attention", "tokens_per_second"):
        written = [json.loads(line)[name] for line in lines]
        assert [e.value for e in found.Scalars(name)] == pytest.approx(written, rel=1e-5)
    assert "ratio_quantiles/p90" in found.Tags()["scalars"]


class Broken:
    name = "broken"

    def log(self, _values: Mapping[str, Any], step: int) -> None:
        raise OSError(f"step {step}: no network")


def test_a_tracker_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Trackers([Broken()]).log({"loss": 1.0}, 3)
    assert "broken did not accept step 3" in caplog.text


_OFFLINE = """
import sys
from agentrl.config.command_line import parse_flags
from agentrl.trainer.metrics.trackers import open_trackers
trackers = open_trackers(parse_flags(sys.argv[1:]))
trackers.log({"loss": 1.25, "seconds": {"publish": 2.0}, "skipped": "no number"}, 1)
trackers.log({"eval": {"reward_mean": 0.5}}, 2)
trackers.finish()
"""


def wandb_history(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return what an offline run of W&B holds: steps with names and values."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.rglob("*.wandb")
    data = path.read_bytes()
    assert len(data) < 2**15, "longer logs are cut into blocks"
    found = []
    position = 7  # behind the file's own header; each record has one of checksum, length and kind
    while position < len(data):
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        record = protocol.Record()
        record.ParseFromString(data[position + 7 : position + 7 + length])
        position += 7 + length
        if record.HasField("history"):
            items = record.history.item
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            own = {name: value for name, value in values.items() if not name.startswith("_")}
            found.append((record.history.step.num or values["_step"], own))
    return found


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_offline_runs_are_written_without_a_secret(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    flags = {
        **SECRETS,
        "inference_backend": "sglang",
        "run_name": "tracked",
        "report_to": name,
        "output_dir": tmp_path / "out",
    }
    del flags["mcp_servers"], flags["inference_api_key"]
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_LEVEL": "warning",
        "HOME": str(tmp_path),
        "MONGODB_URI": SECRETS["db_connection_string"],
        "AGENTRL_API_KEY": SECRET,
    }
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE, *(f"--{key}={value}" for key, value in flags.items())],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = [path for path in (tmp_path / "out" / name).rglob("*") if path.is_file()]
    assert any(b"loss" in path.read_bytes() for path in files)
    if name == "wandb":
        assert wandb_history(tmp_path / "out") == [
            (1, {"loss": 1.25, "seconds/publish": 2.0}),
            (2, {"eval/reward_mean": 0.5}),
        ]
    assert holds_secret(tmp_path) == []


_READ_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("agentrl")
logs = SQLiteStorage.get_logs("agentrl", "tracked")
print(json.dumps([run.name, dict(run.config), [log.get("loss") for log in logs]]))
"""
_READ_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
history = {n: [m.value for m in client.get_metric_history(run.info.run_id, n)] for n in run.data.metrics}
print(json.dumps([run.info.run_name, run.data.params, history]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_local_store_holds_a_run_that_was_resumed_with_other_flags(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MONGODB_URI": SECRETS["db_connection_string"],
        "AGENTRL_API_KEY": SECRET,
    }

    def run(code: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    flags = {
        **{
            key: value
            for key, value in SECRETS.items()
            if key not in ("mcp_servers", "inference_api_key")
        },
        "inference_backend": "sglang",
        "run_name": "tracked",
        "report_to": name,
        "output_dir": tmp_path / "out",
    }
    for max_steps in (5, 6):
        values = flags | {"max_steps": max_steps}
        run(_OFFLINE, *(f"--{key}={value}" for key, value in values.items()))
    if name == "mlflow":
        database = tmp_path / "out/mlflow/mlflow.db"
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{database}"
        run_name, params, history = json.loads(run(_READ_MLFLOW).splitlines()[-1])
        assert history == {
            "loss": [1.25, 1.25],
            "seconds/publish": [2.0, 2.0],
            "eval/reward_mean": [0.5, 0.5],
        }
        assert params["max_steps"] == "5"
    else:
        run_name, params, losses = json.loads(run(_READ_TRACKIO).splitlines()[-1])
        assert params["max_steps"] in (5, 6)
        assert [loss for loss in losses if loss is not None] == [1.25, 1.25]
    assert run_name == "tracked"
    assert holds_secret(tmp_path) == []


async def first_line(path: Path) -> str:
    """Return a file's first line, once it is there: figures are exposed before they are written."""
    async with asyncio.timeout(60):
        while not (path.exists() and "\n" in path.read_text()):
            await asyncio.sleep(0.05)
    return path.read_text().splitlines()[0]


async def test_prometheus_sees_what_a_trainer_does(
    make_config: MakeConfig,
    store: TrajectoryStore,
    model_path: Path,
    mongo_uri: str,
    tmp_path: Path,
) -> None:
    """A real trainer, scraped between two steps while it waits for samples."""
    await store.tasks.add(train_tasks(4, 3))
    await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    port = free_port()
    config = make_config(
        max_steps=2, groups_per_step=1, enable_sampling="true", metrics_port=port, min_turns=3
    )
    write_config(config, tmp_path / "config.yaml")
    with (tmp_path / "log").open("wb") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "train", "--config", str(tmp_path / "config.yaml")],
            env={**os.environ, "MONGODB_URI": mongo_uri},
            stderr=log,
        )
    try:
        found = await scrape_until(port, config.run.output_path, "agentrl_trainer_step", 1)
        step = json.loads(await first_line(config.run.output_path / "metrics.jsonl"))
        assert found[("agentrl_trainer_loss", ())] == step["loss"]
        assert found[("agentrl_trainer_trained_tokens_total", ())] == step["num_trained_tokens"]
        assert ("agentrl_trainer_seconds_total", (("phase", "forward_backward"),)) in found
        # The right record had fewer turns than asked for: its 2 turns of 4 tokens are left out.
        masked = found[("agentrl_trainer_masked_tokens_total", (("reason", "few_turns"),))]
        assert masked == step["masked_tokens"]["few_turns"] == 8
    finally:
        trainer.terminate()
        status = await asyncio.to_thread(trainer.wait, 60)
    assert status == INTERRUPTED


def test_without_trackers_nothing_is_started(make_config: MakeConfig) -> None:
    open_trackers(make_config(report_to="none")).finish()
