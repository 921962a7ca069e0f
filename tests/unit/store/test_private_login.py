"""Another user of the same machine, `nobody`, beside a private mongod."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient
from support.attacks.stranger import as_stranger

from agentrl.store.private_mongod import EmbeddedMongo, running_uri


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, as a home or a scratch directory often is."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_read_nor_alter_nor_register(open_folder: Path) -> None:
    data_dir = open_folder / "mongo"
    with EmbeddedMongo(data_dir) as mongo:
        with MongoClient[dict[str, object]](mongo.uri()) as client:
            client["run"].tasks.insert_one({"answer": "the reference"})
            client["run"].records.insert_one({"score": {"value": 0.0}})
        said = as_stranger(mongo.port, data_dir)
        with MongoClient[dict[str, object]](mongo.uri()) as client:
            assert client["run"].records.find_one({"score.value": 1.0}) is None
            assert client["run"].inference_services.find_one() is None
    assert len(said) == 8
    assert [line for line in said if not line.endswith("refused 13")] == []


def test_the_password_stays_in_a_file_of_its_owner(open_folder: Path) -> None:
    data_dir = open_folder / "mongo"
    with EmbeddedMongo(data_dir) as mongo:
        first = mongo.uri("run")
        password = first.partition("agentrl:")[2].partition("@")[0]
        assert running_uri(data_dir) == mongo.uri()
        argv = Path(f"/proc/{mongo.pid}/cmdline").read_text()
    assert len(password) == 64
    assert password not in argv
    assert data_dir.stat().st_mode & 0o777 == 0o700
    holding = [path for path in data_dir.iterdir() if path.is_file()]
    assert [path.name for path in holding if path.stat().st_mode & 0o077] == []
    logs = (data_dir / "mongod.log").read_text() + (data_dir / "mongod.out").read_text()
    assert password not in logs
    with EmbeddedMongo(data_dir) as mongo:  # the same login at the next start
        assert password in mongo.uri("run")
        with MongoClient[dict[str, object]](mongo.uri()) as client:
            client["run"].tasks.insert_one({})


def test_data_of_a_mongod_without_a_login_get_one(open_folder: Path) -> None:
    data_dir = open_folder / "mongo"
    with EmbeddedMongo(data_dir) as mongo, MongoClient[dict[str, object]](mongo.uri()) as client:
        client["run"].tasks.insert_one({"answer": "kept"})
    (data_dir / "agentrl-password").unlink()
    with EmbeddedMongo(data_dir) as mongo, MongoClient[dict[str, object]](mongo.uri()) as client:
        found = client["run"].tasks.find_one()
        assert found is not None
        assert found["answer"] == "kept"
