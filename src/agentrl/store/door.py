"""What every part of the store shares: the collections, and one place where errors are wrapped."""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from bson.errors import BSONError
from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from agentrl.errors import StoreError
from agentrl.store.blobs import BlobStore
from agentrl.store.codec import Document

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound="Door")

RETRY_DELAYS_SECONDS = (0.1, 0.5, 2.0)
"""Waits before a repeated operation, after the driver's own retry. Covers a step-down or restart."""

_TLS_FAILED = "CERTIFICATE_VERIFY_FAILED"
_AUTH_CODES = frozenset({18, 8000})
_UNAUTHORIZED = 13


class Door:
    """The collections of one run's database."""

    def __init__(
        self, client: AsyncMongoClient[Document], database: AsyncDatabase[Document], uri: str
    ) -> None:
        self._client = client
        self._db = database
        self._uri = uri
        self._runs = database["runs"]
        self._tasks = database["tasks"]
        self._records = database["records"]
        self._turns = database["turns"]
        self._record_data = database["record_data"]
        self._turn_training = database["turn_training"]
        self._policies = database["policies"]
        self._services = database["inference_services"]
        self._samplers = database["samplers"]
        self._blobs = BlobStore(database["blobs"])
        self._trainer_fences: dict[str, int] = {}

    @property
    def database_name(self) -> str:
        """Name of the run's database."""
        return self._db.name

    def uri_for_people(self) -> str:
        """Return the connection string to show: with the database, without the password."""
        return with_database(without_password(self._uri), self._db.name)


def without_password(uri: str) -> str:
    """Return `uri` with its password, and whatever options carry secrets, replaced by `***`."""
    redacted = re.sub(r"(?<=://)([^/@:]*):[^@]*(?=@)", r"\1:***", uri)
    return re.sub(r"(?i)((?:password|token|secret)[^=&]*=)[^&]*", r"\1***", redacted)


def with_database(uri: str, database: str) -> str:
    """Return `uri` with its path naming `database`."""
    scheme, _, rest = uri.partition("://")
    hosts, _, tail = rest.partition("/")
    options = tail.partition("?")[2]
    return f"{scheme}://{hosts}/{database}" + (f"?{options}" if options else "")


def hosts_of(uri: str) -> str:
    """Return the `host:port` list of a connection string."""
    return uri.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]


def one_line(error: BaseException, uri: str) -> str:
    """Say in one line what went wrong and what to check; never with credentials."""
    hosts = hosts_of(uri)
    if isinstance(error, AutoReconnect) and _TLS_FAILED in str(error):
        return f"MongoDB at {hosts} speaks TLS, but its certificate is not trusted; check tlsCAFile"
    if isinstance(error, AutoReconnect):
        return (
            f"MongoDB at {hosts} does not answer; check that it runs and that the address is right"
        )
    if isinstance(error, OperationFailure) and error.code in _AUTH_CODES:
        return f"MongoDB at {hosts} refused the login; check user, password and authSource"
    if isinstance(error, OperationFailure) and error.code == _UNAUTHORIZED:
        return (
            f"MongoDB at {hosts} does not allow this login to do so; it needs the role readWrite on "
            "the run's database (and dbAdmin to delete it)"
        )
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


@asynccontextmanager
async def boundary(what: str, uri: str) -> AsyncIterator[None]:
    """Turn errors of the driver inside the block into a StoreError that begins with `what`."""
    try:
        yield
    except (PyMongoError, BSONError) as error:
        raise StoreError(f"{what}: {one_line(error, uri)}") from error


def operation(
    what: str, *, repeatable: bool = True
) -> Callable[
    [Callable[Concatenate[D, P], Coroutine[Any, Any, R]]],
    Callable[Concatenate[D, P], Coroutine[Any, Any, R]],
]:
    """Make a method of the store an operation at the door.

    Driver errors become StoreErrors. A repeatable operation (one that may run twice without harm)
    is tried again, a bounded number of times, when the connection or the primary went away.

    Args:
        what: what is being done, for the error text.
        repeatable: False where a second run would not be the same as one.
    """

    def decorate(
        method: Callable[Concatenate[D, P], Coroutine[Any, Any, R]],
    ) -> Callable[Concatenate[D, P], Coroutine[Any, Any, R]]:
        @functools.wraps(method)
        async def wrapper(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
            delays = RETRY_DELAYS_SECONDS if repeatable else ()
            async with boundary(what, self._uri):
                for delay in delays:
                    try:
                        return await method(self, *args, **kwargs)
                    except AutoReconnect:
                        await asyncio.sleep(delay)
                return await method(self, *args, **kwargs)

        return wrapper

    return decorate


def first(document: Any, what: str) -> Document:
    """Return `document`, which must be there.

    Raises:
        StoreError: it is not.
    """
    if document is None:
        raise StoreError(f"{what} does not exist")
    found: Document = document
    return found
