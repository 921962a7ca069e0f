"""Another user of the same machine, `nobody`, beside a private mongod."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient

from agentrl.store.private_mongod import EmbeddedMongo, running_uri

NOBODY = 65534

AS_STRANGER = """
import os
import sys
from pymongo import MongoClient
from pymongo.errors import PyMongoError

# Only now: an interpreter below /root can be started by root alone.
port, folder, user = sys.argv[1:]
os.setgroups([])
os.setgid(int(user))
os.setuid(int(user))
client = MongoClient(f"mongodb://127.0.0.1:{port}/?directConnection=true", serverSelectionTimeoutMS=5000)
run = client["run"]
def files():
    return [open(os.path.join(folder, name)).read() for name in os.listdir(folder)]
attempts = {
    "answers are read": lambda: run.tasks.find_one(),
    "a score is altered": lambda: run.records.update_one({}, {"$set": {"score.value": 1.0}}),
    "a server is registered": lambda: run.inference_services.insert_one({"base_url": "http://me"}),
    "a user is created": lambda: client.admin.command("createUser", "me", pwd="me", roles=["root"]),
    "the replica set is read": lambda: client.local["system.replset"].find_one(),
    "databases are listed": lambda: client.list_database_names(),
    "the server is ended": lambda: client.admin.command("shutdown", force=True),
    "files are read": files,
}
for name, attempt in attempts.items():
    try:
        attempt()
    except PyMongoError as error:
        print(f"{name}: refused {getattr(error, 'code', None)}")
    except OSError:
        print(f"{name}: refused {13}")
    else:
        print(f"{name}: DONE")
"""


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
        stranger = subprocess.run(
            [sys.executable, "-c", AS_STRANGER, str(mongo.port), str(data_dir), str(NOBODY)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        with MongoClient[dict[str, object]](mongo.uri()) as client:
            assert client["run"].records.find_one({"score.value": 1.0}) is None
            assert client["run"].inference_services.find_one() is None
    said = stranger.stdout.splitlines()
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
