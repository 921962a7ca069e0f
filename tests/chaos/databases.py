"""The run's MongoDB under faults: a private mongod whose disk can be spoilt, or a set of three.

Both start and stop from the main thread, and are watched by the harness.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from agentrl.runtime.ports import ReservedPort
from agentrl.runtime.processes.child_processes import end_with_parent
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod

DISK_MEGABYTES = 1024
_START_SECONDS = 60.0
_NAME = "chaos"


class SingleMongod:
    """A private mongod: killed, or run against a full disk."""

    def __init__(self, folder: Path, port: int) -> None:
        self.disk = folder / "disk"
        self._mongo = EmbeddedMongo(self.disk / "mongo", port)
        self._folder = folder
        self._ballast = self.disk / "ballast"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._mongo.port

    def uri(self, database: str, port: int) -> str:
        """Return the connection string that leads through `port`."""
        uri = self._mongo.uri(database).replace(f":{self.port}/", f":{port}/")
        return uri.replace("replicaSet=rs0", "directConnection=true")

    def start(self) -> None:
        """Start it, again on the same port and data."""
        self._mongo.start()

    def stop(self) -> None:
        """End it."""
        self._mongo.stop()

    def kill(self) -> None:
        """Kill it and start it again."""
        self.signal(signal.SIGKILL)
        self._mongo.stop()
        self._mongo.start()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._mongo.pid, number)

    def revive(self) -> bool:
        """Start it again if it ended by itself; return whether it had."""
        if self._mongo.exit_status() is None:
            return False
        self._mongo.stop()
        self._mongo.start()
        return True

    def fill_disk(self) -> None:
        """Leave no byte free."""
        with suppress(OSError), self._ballast.open("wb") as ballast:
            while True:
                ballast.write(bytes(2**20))
                ballast.flush()

    def free_disk(self) -> None:
        """Give the space back."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def single_mongod(folder: Path, port: int) -> Iterator[SingleMongod]:
    """Run one on a file system of its own, where this user may mount one."""
    found = SingleMongod(folder, port)
    found.disk.mkdir(parents=True)
    is_mounted = can_mount() and _run(
        "mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", found.disk
    )
    try:
        found.start()
        yield found
    finally:
        with suppress(Exception):
            found.stop()
        if is_mounted:
            _run("umount", "--lazy", found.disk)  # also where a process that died late still has it


def can_mount() -> bool:
    """Whether a file system of a given size can be had."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def _run(*command: object) -> bool:
    return subprocess.run([str(word) for word in command], check=False).returncode == 0


class ReplicaSet:
    """Three mongods that elect a primary."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        self._folder = folder
        self.ports = ports
        self._members: dict[int, subprocess.Popen[bytes]] = {}

    def uri(self, database: str) -> str:
        """Return the connection string."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"mongodb://{hosts}/{database}?replicaSet={_NAME}&w=majority&journal=true"

    def start(self) -> None:
        """Start all, and wait for a primary."""
        for port in self.ports:
            self._spawn(port)
        members = [
            {"_id": number, "host": f"127.0.0.1:{port}"} for number, port in enumerate(self.ports)
        ]
        settings = {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500}
        for port in self.ports:
            with MongoClient[dict[str, Any]](
                port=port, directConnection=True, serverSelectionTimeoutMS=30000
            ) as client:
                client.admin.command("ping")
        with MongoClient[dict[str, Any]](port=self.ports[0], directConnection=True) as client:
            config = {"_id": _NAME, "members": members, "settings": settings}
            client.admin.command("replSetInitiate", config)
        self.primary()

    def stop(self) -> None:
        """End all."""
        for process in self._members.values():
            process.kill()
            process.wait()

    def primary(self) -> int:
        """Return the port of the primary, once there is one."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            for port in self.ports:
                with (
                    suppress(PyMongoError),
                    MongoClient[dict[str, Any]](
                        port=port, directConnection=True, serverSelectionTimeoutMS=500
                    ) as client,
                ):
                    if client.admin.command("hello")["isWritablePrimary"]:
                        return port
            time.sleep(0.1)
        raise TimeoutError(f"the replica set elected no primary in {_START_SECONDS:g} s")

    def step_down(self) -> None:
        """Have the primary hand over; it is not elected again for some seconds."""
        with (
            suppress(PyMongoError),
            MongoClient[dict[str, Any]](port=self.primary(), directConnection=True) as client,
        ):
            client.admin.command("replSetStepDown", 5, force=True)
        self.primary()

    def lose(self, *, primary: bool) -> None:
        """Kill the primary, or another member; it comes back after the others have elected one."""
        leader = self.primary()
        port = leader if primary else next(port for port in self.ports if port != leader)
        self._members[port].kill()
        self._members[port].wait()
        if primary:
            time.sleep(0.5)  # until then it may still be taken for the primary
            self.primary()
        self._spawn(port)

    def _spawn(self, port: int) -> None:
        data = self._folder / f"member-{port}"
        data.mkdir(parents=True, exist_ok=True)
        command = [find_mongod(), "--dbpath", data, "--port", port, "--bind_ip", "127.0.0.1"]
        command += ["--replSet", _NAME, "--oplogSize", 64, "--wiredTigerCacheSizeGB", 0.25]
        command += ["--nounixsocket", "--logpath", data / "mongod.log", "--logappend", "--quiet"]
        self._members[port] = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.DEVNULL,
            preexec_fn=end_with_parent(signal.SIGKILL),
        )


@contextmanager
def replica_set(folder: Path) -> Iterator[ReplicaSet]:
    """Run three members; they end with the block."""
    with ExitStack() as stack:
        reserved = [stack.enter_context(ReservedPort("127.0.0.1")) for _ in range(3)]
        found = ReplicaSet(folder, [one.port for one in reserved])
        stack.callback(found.stop)
        found.start()
        yield found
