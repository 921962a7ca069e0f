"""The connection to one run's database, and the translation of the driver's errors.

Input: a connection string or a client. Output: a `RunDatabase`, from which the repositories take
their collections. `operation` decorates the methods that talk to the server: it retries the
repeatable ones and translates the driver's errors into one-line `StoreError`s. This module does not
know what documents contain.
"""

import asyncio
import functools
import inspect
import logging
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import chain, repeat
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import parse_qsl

from bson.codec_options import CodecOptions
from bson.errors import BSONError
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    CollectionInvalid,
    ConfigurationError,
    ConnectionFailure,
    InvalidName,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)
from pymongo.write_concern import WriteConcern

from agentrl.addresses import host_name, is_loopback
from agentrl.config.secrets import redact
from agentrl.config.sections.run_sections import MONGODB_DATABASES
from agentrl.errors import ConfigError, RunDropped, StoreError, StoreUnreachable
from agentrl.store.documents.codec import Document
from agentrl.store.server_clock import FreshLeases, ServerClock

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

DURABLE = WriteConcern(w="majority", j=True)
"""An acknowledged write survives the death of any process and of a minority of the servers."""
RETRY_DELAYS_SECONDS = (0.1, 0.5, 2.0, 4.0)
"""Waits before an operation is repeated, after the driver's own retry; the last one recurs."""
OUTAGE_SECONDS = 20.0
"""How long a repeatable operation is retried by default. Covers a step-down or a restart."""
_OUTAGE_NOTICE_SECONDS = 15.0
SELECTION_SECONDS = 2.5
"""How long each attempt at an operation waits for a server that accepts it."""
SETTLE_SECONDS = 0.05
UNAUTHORIZED = 13
NAMESPACE_EXISTS = 48
"""Error codes of the server."""

_NOT_PRIMARY = frozenset({91, 189, 10058, 10107, 11600, 11602, 13435, 13436})
"""Error codes of a server that is not the primary, or is stepping down."""
_KEYS_NOT_LOADED = 211
"""Error code of a server that has just started, or whose clock jumped, and cannot verify signed
times yet."""
_NO_SPACE = "No space left on device"
"""End of the message of a server that cannot write; its error code is that of any unknown error."""
_LOGIN_REFUSED = frozenset({18, 8000})
_NO_LOGIN = "requires authentication"
"""End of the message of a server to a client that has not logged in."""
_TLS_FAILED = "CERTIFICATE_VERIFY_FAILED"
_AWARE: CodecOptions[Document] = CodecOptions(tz_aware=True)
_FORKED_COLLECTIONS = frozenset({"tasks", "records", "turns", "record_data"})
"""Collections that are separate for forks."""
FORKS_PREFIX = "forks."
"""Of the names under which the server knows them."""


class RunDatabase:
    """The database of one run, with its collections."""

    def __init__(
        self,
        client: AsyncMongoClient[Document],
        handle: AsyncDatabase[Document],
        uri: str,
        *,
        of_forks: bool = False,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        """Wrap a driver's database.

        Args:
            client: the client that the database belongs to.
            handle: the database; its write concern must be `DURABLE`.
            uri: the address for error messages, which never show its password.
            of_forks: use the forks' collections of tasks, records and turns, which training and
                counts ignore.
            outage_seconds: how long repeatable operations are retried while the server is away.
        """
        self.client = client
        self.handle = handle
        self.uri = uri
        self._of_forks = of_forks
        self.outage_seconds = outage_seconds
        """May be shortened at any time, also for operations that are being retried."""
        self._next_notice = 0.0
        self.clock = ServerClock()
        self.leases = FreshLeases()
        self.runs = self["runs"]
        self.tasks = self["tasks"]
        self.records = self["records"]
        self.turns = self["turns"]
        self.record_data = self["record_data"]
        self.turn_training = self["turn_training"]
        self.policies = self["policies"]
        self.services = self["inference_services"]
        self.samplers = self["samplers"]
        self.blobs = self["blobs"]
        self.forks = self["forks"]
        self.audit = self["audit"]

    def __getitem__(self, collection: str) -> AsyncCollection[Document]:
        return self.handle[self.stored_name(collection)]

    def stored_name(self, collection: str) -> str:
        """Return the name under which the server knows a collection."""
        return (
            f"{FORKS_PREFIX}{collection}"
            if self._of_forks and collection in _FORKED_COLLECTIONS
            else collection
        )

    def of_forks(self) -> "RunDatabase":
        """Return the same database with the collections of forks."""
        return RunDatabase(
            self.client,
            self.handle,
            self.uri,
            of_forks=True,
            outage_seconds=self.outage_seconds,
        )

    @property
    def name(self) -> str:
        """Name of the database: the run's."""
        return self.handle.name

    @property
    def redacted_uri(self) -> str:
        """The connection string of this database without its password."""
        return with_database(redact(self.uri), self.name)

    async def aggregate(
        self, collection: AsyncCollection[Document], pipeline: list[Document], session: Any = None
    ) -> list[Document]:
        """Return all results of an aggregation pipeline, read in a session if one is given."""
        cursor: Any = collection.aggregate(pipeline, session=session)
        if inspect.isawaitable(cursor):
            cursor = await cursor  # PyMongo returns a coroutine, Motor the cursor itself
        found: list[Document] = await cursor.to_list()
        return found

    async def collections(self, **filter_: str) -> dict[str, Document]:
        """Return the options of the existing collections (or views), by name."""
        found = await (await self.handle.list_collections(filter=filter_)).to_list()
        return {one["name"]: one.get("options", {}) for one in found}

    async def create_collection(self, name: str, **options: Any) -> bool:
        """Create a collection or view; False when another process did so a moment ago."""
        try:
            await self.handle.create_collection(name, **options)
        except CollectionInvalid:
            return False
        except OperationFailure as error:
            if error.code != NAMESPACE_EXISTS:
                raise
            return False
        return True

    async def server_time(self) -> datetime:
        """Return the database server's time, by which all leases are measured."""
        hello = await self.handle.command("hello", codec_options=_AWARE)
        now: datetime = hello["localTime"]
        self.clock.note(now)
        return now

    @asynccontextmanager
    async def boundary(self, action: str) -> AsyncIterator[None]:
        """Turn errors of the driver inside the block into a StoreError that starts with `action`."""
        try:
            yield
        except (PyMongoError, BSONError) as error:
            is_unreachable = is_passing(error) or isinstance(
                error, ConnectionFailure | ConfigurationError
            )
            kind = StoreUnreachable if is_unreachable else StoreError
            raise kind(f"{action}: {_one_line(error, self.uri)}") from error

    async def retried(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """Retry an operation after transient failures, for at most `outage_seconds`."""
        delays = chain(RETRY_DELAYS_SECONDS, repeat(RETRY_DELAYS_SECONDS[-1]))
        began = None
        while True:
            try:
                return await attempt()
            except PyMongoError as error:
                if not is_passing(error):
                    raise
                now, delay = time.monotonic(), next(delays)
                # The first failure starts the outage, because an attempt may take long.
                began = began or now
                seconds_left = began + self.outage_seconds - now
                if delay > seconds_left:
                    raise
                self._note_outage(error, seconds_left)
            await asyncio.sleep(delay)

    def _note_outage(self, error: PyMongoError, seconds_left: float) -> None:
        """Log an outage longer than the default; one line for all waiting operations."""
        now = time.monotonic()
        if self.outage_seconds > OUTAGE_SECONDS and now >= self._next_notice:
            self._next_notice = now + _OUTAGE_NOTICE_SECONDS
            logger.warning(
                "%s; retrying for up to %.0f s", _one_line(error, self.uri), seconds_left
            )

    def no_run(self) -> StoreError:
        """Return the error of an operation that needs a run if none exists."""
        return StoreError(f"database {self.name!r} contains no run yet")

    def run_dropped(self) -> RunDropped:
        """Return the error of a process whose run existed before."""
        return RunDropped(
            f"the run in database {self.name!r} is gone: the database was dropped or emptied while "
            "processes worked on it"
        )


class Repository:
    """Base of the repositories: each reads and writes one kind of document."""

    def __init__(self, database: RunDatabase) -> None:
        self._db = database


# --- operations ---------------------------------------------------------------------------------


class _HasDatabase(Protocol):
    _db: RunDatabase


D = TypeVar("D", bound=_HasDatabase)
_Method = Callable[Concatenate[D, P], Coroutine[Any, Any, R]]


def operation(
    action: str, *, repeatable: bool = True
) -> Callable[[_Method[D, P, R]], _Method[D, P, R]]:
    """Make a method an operation on the database.

    Driver errors become StoreErrors. A repeatable operation (one that may run twice without harm)
    is retried for a bounded time after the connection or the primary was lost.
    """

    def decorate(method: _Method[D, P, R]) -> _Method[D, P, R]:
        @functools.wraps(method)
        async def wrapper(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
            attempt = functools.partial(method, self, *args, **kwargs)
            async with self._db.boundary(action):
                return await (self._db.retried(attempt) if repeatable else attempt())

        return wrapper

    return decorate


def is_passing(error: Exception) -> bool:
    """Return whether an operation failed for a transient reason: no connection, primary or disk space.

    A primary that steps down while a write awaits its majority replies with a write concern error,
    which the driver does not classify as a connection error.
    """
    if _is_disk_full(error):
        return True
    if isinstance(error, BulkWriteError):
        unconfirmed = (error.details or {}).get("writeConcernErrors", ())
        return any(one["code"] in _NOT_PRIMARY for one in unconfirmed)
    if isinstance(error, WriteConcernError):
        return error.code in _NOT_PRIMARY
    return isinstance(error, AutoReconnect) or (
        isinstance(error, OperationFailure) and error.code == _KEYS_NOT_LOADED
    )


def _is_disk_full(error: Exception) -> bool:
    if not isinstance(error, OperationFailure):
        return False
    errors = [error.details or {}, *(error.details or {}).get("writeErrors", ())]
    return any(str(one.get("errmsg", "")).endswith(_NO_SPACE) for one in errors)


def _one_line(error: Exception, uri: str) -> str:
    """Describe an error and its remedy in one line, without credentials."""
    hosts = _hosts_of(uri)
    if _is_disk_full(error):
        return f"the disk of MongoDB at {hosts} is full; free some space on it"
    if isinstance(error, AutoReconnect) and _TLS_FAILED in str(error):
        return f"the TLS certificate of MongoDB at {hosts} is not trusted; check tlsCAFile"
    if is_passing(error):
        return (
            f"MongoDB at {hosts} does not respond; check that it is running and that the address "
            "is correct"
        )
    if isinstance(error, OperationFailure) and error.code in _LOGIN_REFUSED:
        return f"MongoDB at {hosts} refused the login; check user, password and authSource"
    if isinstance(error, OperationFailure) and error.code == UNAUTHORIZED:
        if _NO_LOGIN in str(error):
            return (
                f"MongoDB at {hosts} requires a login, and the connection string has no user and "
                "password; add USER:PASSWORD@ before the host"
            )
        return (
            f"MongoDB at {hosts} does not authorize this login; it needs the role readWrite on "
            "the run's database (and dbAdmin to delete it)"
        )
    text = " ".join(redact(str(error)).split())
    if isinstance(error, ConfigurationError):  # a name that cannot be looked up
        text = f"MongoDB at {hosts}: {text.rstrip('.')}; check the address"
    return text if len(text) <= 300 else text[:297] + "..."


# --- addresses ----------------------------------------------------------------------------------


def with_database(uri: str, database: str) -> str:
    """Return `uri` with its path naming `database`."""
    scheme, _, rest = uri.partition("://")
    hosts, _, tail = rest.partition("/")
    options = tail.partition("?")[2]
    return f"{scheme}://{hosts}/{database}" + (f"?{options}" if options else "")


def _hosts_of(uri: str) -> str:
    return uri.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]


def has_login(uri: str) -> bool:
    """Return whether a URI names a user, or another way to authenticate."""
    return "@" in uri.partition("?")[0] or "authmechanism=" in uri.lower()


def unencrypted_hosts(uri: str) -> list[str]:
    """Return the hosts beyond this machine that a URI reaches without TLS."""
    options = parse_qsl(uri.partition("?")[2].lower())
    has_tls = any(name.startswith(("tls", "ssl")) and value != "false" for name, value in options)
    if has_tls or uri.startswith("mongodb+srv:"):
        return []
    hosts = [host_name(host) for host in _hosts_of(uri).split(",")]
    return [host for host in hosts if not is_loopback(host) and "%2f" not in host.lower()]


# --- connections --------------------------------------------------------------------------------


@asynccontextmanager
async def connected(
    uri: str,
    name: str | None,
    server_selection_timeout: float,
    outage_seconds: float = OUTAGE_SECONDS,
) -> AsyncIterator[RunDatabase]:
    """Connect, check that the server responds, and close on exit."""
    client = _client(uri, server_selection_timeout)
    if unencrypted := unencrypted_hosts(uri):
        logger.warning(
            "connecting to MongoDB at %s without TLS: questions and texts cross the network "
            "unencrypted; add tls=true unless you trust the network",
            ", ".join(unencrypted),
        )
    try:
        handle = _durable_database(client, name)
        database = RunDatabase(client, handle, uri, outage_seconds=outage_seconds)
        async with database.boundary("connect"):
            await _check_reachable(client)
            await database.server_time()
        yield database
    finally:
        await client.close()


def given_database(client: Any, name: str | None) -> RunDatabase:
    """Return the database of the caller's client, PyMongo's asynchronous one or Motor's.

    Motor has reached its end of life and is not imported here. For our purposes the two clients
    differ only in `aggregate`.
    """
    handle = _durable_database(client, name)
    return RunDatabase(client, handle, "mongodb://the-address-of-the-given-client/")


async def _check_reachable(client: AsyncMongoClient[Document]) -> None:
    try:
        await client.admin.command("ping")
    except ConnectionFailure:
        # When a client is closed, the driver leaks a socket that is still connecting, and the
        # interpreter warns about it. A refused connection ends within this time.
        await asyncio.sleep(SETTLE_SECONDS)
        raise


def _client(uri: str, server_selection_timeout: float) -> AsyncMongoClient[Document]:
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # an unknown option
            return AsyncMongoClient(
                uri,
                tz_aware=True,
                appname="agentrl",
                serverSelectionTimeoutMS=round(server_selection_timeout * 1000),
            )
    except UserWarning as warning:
        problem = str(warning).partition(". ")[0]
        raise ConfigError(f"invalid MongoDB connection string: {problem}") from None
    except (ConfigurationError, ValueError) as error:
        # The driver's text may contain the URI, so only the type of the error is shown.
        raise ConfigError(
            f"invalid MongoDB connection string ({type(error).__name__}); expected "
            "mongodb://user:password@host:27017/database, with @ : / and % in the password written "
            "as %40, %3A, %2F and %25"
        ) from None


def _durable_database(
    client: AsyncMongoClient[Document], name: str | None
) -> AsyncDatabase[Document]:
    try:
        if name is not None:
            database = client.get_database(name, write_concern=DURABLE, codec_options=_AWARE)
        else:
            database = client.get_default_database(write_concern=DURABLE, codec_options=_AWARE)
    except InvalidName as error:
        raise ConfigError(f"{name!r} is not a valid database name: {error}") from error
    except ConfigurationError as error:
        raise ConfigError("no database given: give a run name, or a URI with /database") from error
    if database.name.casefold() in MONGODB_DATABASES:
        raise ConfigError(f"{database.name!r} is reserved by MongoDB; choose another")
    return database
