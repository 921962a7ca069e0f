"""What another user of the machine tries against a private mongod."""

import subprocess
import sys
from pathlib import Path

NOBODY = 65534

_PROGRAM = """
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


def as_stranger(port: int, data_dir: Path) -> list[str]:
    """Try everything as the user `nobody`, which only root can become; return a line for each."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(port), str(data_dir), str(NOBODY)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()
