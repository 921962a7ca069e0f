"""A run that is started again: while it goes on, and when it has gone further than asked."""

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from agentrl.config.loading import build_config, flat_values
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.launcher.cluster.local_cluster import LocalCluster
from agentrl.launcher.cluster.resume_checks import (
    changes_since,
    check_checkpoints,
    check_no_trainer,
    check_not_running,
    check_owner,
)
from agentrl.launcher.training_run import already_done
from agentrl.renderers.model_files import read_model_files
from agentrl.runtime.processes.process_identity import new_lease_owner, this_user
from agentrl.schema import Policy, Run
from agentrl.store import TrajectoryStore, mongod_folder
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.text_digests import text_digests

WHERE = rf"on {re.escape(socket.gethostname())}, process {os.getpid()}, since 20\d\d-\d\d-\d\d"


def config_in(folder: Path, **flags: object) -> RootConfig:
    places = {"output_dir": folder / "out", "mongo_data_dir": folder / "mongo", "mongo_port": 0}
    return build_config({"run_name": "mine", **places, **flags})


async def test_a_second_start_says_where_and_since_when_the_run_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mongod_folder, "CLAIM_SECONDS", 0.1)
    config = config_in(tmp_path)
    check_not_running(config)
    async with LocalCluster(config) as cluster:
        await cluster.open_store()
        said = rf"^run 'mine' is already running: `.*` {WHERE}.*inspect progress --follow"
        with pytest.raises(StoreError, match=said):
            check_not_running(config)
        # Two that start at the same moment meet at the lock of the data.
        async with LocalCluster(config) as second:
            with pytest.raises(StoreError, match=said):
                await second.open_store()
    check_not_running(config)


async def test_a_start_waits_for_a_look_and_names_what_serves_the_data_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    monkeypatch.setattr(mongod_folder, "CLAIM_SECONDS", 0.1)
    monkeypatch.setattr("sys.argv", ["/usr/bin/agentrl", "store", "up"])
    with EmbeddedMongo(tmp_path / "mongo"):
        check_not_running(config)
        async with LocalCluster(config) as cluster:
            with pytest.raises(StoreError, match=r"in use by `agentrl store` on .*; stop it first"):
                await cluster.open_store()


async def test_in_a_database_of_ones_own_it_is_the_trainer_that_is_named(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    config = config_in(tmp_path)
    await store.runs.create(Run(name=store.database_name))
    await check_no_trainer(config, store)
    await store.trainer_leases.acquire("trainer", new_lease_owner(), 60)
    with pytest.raises(StoreError, match=rf"'mine' is already running: its trainer {WHERE}"):
        await check_no_trainer(config, store)
    await store.trainer_leases.release("trainer")
    await check_no_trainer(config, store)


async def test_a_run_of_another_user_in_a_shared_database_is_joined_only_when_asked(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    shared = {"db_connection_string": "mongodb://127.0.0.1:1"}
    config = config_in(tmp_path, **shared)
    check_owner(config, None)
    await store.runs.create(Run(name=store.database_name))
    check_owner(config, await store.runs.get())  # questions were added, and nobody trained yet
    for owner in ("ann@there", this_user()):  # the first one stays
        await store.runs.set_owner(owner)
    run = await store.runs.get()
    with pytest.raises(ConfigError, match=r"belongs to ann@there, and .* --run_name, or --join"):
        check_owner(config, run)
    check_owner(config_in(tmp_path, join=True, **shared), run)
    check_owner(config_in(tmp_path), run)  # the data are a folder of this user
    kept = config.run.output_path / "checkpoints/000003"
    kept.mkdir(parents=True)
    (kept / "state.json").touch()
    check_owner(config, run)


async def test_files_and_database_that_do_not_belong_together_are_told(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    config = config_in(tmp_path)
    kept = config.run.output_path / "checkpoints/000003"
    kept.mkdir(parents=True)
    (kept / "state.json").touch()
    with pytest.raises(ConfigError, match="of a run whose database is empty; use another"):
        await check_checkpoints(config, store)
    shutil.rmtree(kept)
    assert await check_checkpoints(config, store) is None
    await store.runs.create(Run(name=store.database_name))
    assert await check_checkpoints(config, store) is None
    await store.policies.publish(Policy(version=3, path="p", num_bytes=1))
    note = await check_checkpoints(config, store)
    assert note is not None
    assert "was at version 3, and" in note
    assert "training restarts from step 0" in note


def test_flags_that_a_run_did_not_begin_with_are_noted(tmp_path: Path) -> None:
    def run(**flags: object) -> Run:
        return Run(name="mine", config=flat_values(config_in(tmp_path, **flags)))

    adapter = {"lora_rank": 4}
    assert changes_since(config_in(tmp_path), None) == []
    assert changes_since(config_in(tmp_path, max_steps=9), run(max_steps=3)) == []
    changed = {"loss_calculator": "CISPO", "max_new_tokens": 96, "model_name_or_path": "a/b"}
    began = run(max_new_tokens=48, model_name_or_path="a/a")
    assert changes_since(config_in(tmp_path, **changed), began) == [
        "run 'mine' resumes with changed flags: --model_name_or_path a/a -> a/b, --max_new_tokens "
        "48 -> 96, --loss_calculator GRPO -> CISPO"
    ]
    with pytest.raises(ConfigError, match="'mine' trains all weights; resume it without --lora_ra"):
        changes_since(config_in(tmp_path, **adapter), run())
    with pytest.raises(ConfigError, match="trains an adapter; resume it with --lora_rank 4, or"):
        changes_since(config_in(tmp_path), run(**adapter))


def test_texts_of_the_model_that_changed_in_place_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree("assets/demo/model", folder)
    config = config_in(tmp_path, model_name_or_path=str(folder))
    digests = text_digests(config.model)
    run = Run(name="mine", config=flat_values(config), text_digests=digests)
    assert changes_since(config, run) == []
    changed = read_model_files(folder).chat_template.replace("assistant", "helper")
    (folder / "chat_template.jinja").write_text(changed)
    (note,) = changes_since(config, run)
    assert f"the chat template of {folder} is not the one that run 'mine' was trained" in note
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert "the vocabulary of" in changes_since(config, run)[1]


async def test_a_run_beyond_max_steps_samples_nothing_and_says_how_to_go_on(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name, status="training"))
    await store.policies.publish(Policy(version=10, path="p/10", num_bytes=1))

    async def answer(max_steps: int) -> str | None:
        return await already_done(config_in(tmp_path, max_steps=max_steps).trainer, store)

    with pytest.raises(ConfigError, match="is already at step 10; use --max_steps 11 or more"):
        await answer(3)
    assert await answer(10) is None  # its last evaluation may be missing
    assert await answer(11) is None
    await store.runs.set_status("completed")
    done = await answer(10)
    assert done is not None
    assert "is already at step 10 of --max_steps 10; use --max_steps 11 or more" in done
    assert await answer(11) is None
