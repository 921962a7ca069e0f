"""Servers with logins and TLS, and addresses that come from DNS."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset
import pytest
from pymongo import MongoClient
from support.stored import fill

from agentrl.cli.main import main
from agentrl.errors import StoreError
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod

PASSWORD = "s3cret:/@?"
OPENSSL = [
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:P-256",
    "-nodes",
    "-days",
    "2",
    "-subj",
    "/CN=127.0.0.1",
    "-addext",
    "subjectAltName=IP:127.0.0.1",
]
OPTIONS = "serverSelectionTimeoutMS=3000"


@contextmanager
def mongod_with(folder: Path, *flags: str) -> Iterator[int]:
    """A standalone mongod with further flags; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    data = folder / "data"
    data.mkdir()
    command = [str(find_mongod()), "--dbpath", str(data), "--port", str(port)]
    command += ["--bind_ip", "127.0.0.1", "--nounixsocket", "--replSet", "secured"]
    command += ["--wiredTigerCacheSizeGB", "0.25", "--logpath", str(folder / "log"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait(timeout=60)


def begin(uri: str, port: int, **options: Any) -> None:
    """Make a mongod the primary of a replica set of one, and give it two users."""
    with MongoClient[dict[str, object]](
        uri, directConnection=True, serverSelectionTimeoutMS=20_000, **options
    ) as client:
        members = [{"_id": 0, "host": f"127.0.0.1:{port}"}]
        client.admin.command("replSetInitiate", {"_id": "secured", "members": members})
        while not client.admin.command("hello")["isWritablePrimary"]:
            pass
        # Without --auth users change nothing; with it, this is the first and last open door.
        client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[dict[str, object]](
            uri, directConnection=True, username="root", password=PASSWORD, **options
        ) as known:
            roles = [{"role": "readWrite", "db": "demo"}]
            known.admin.command("createUser", "ada", pwd=PASSWORD, roles=roles)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A mongod that asks for a login (key file, SCRAM)."""
    folder = tmp_path_factory.mktemp("auth")
    key = folder / "key"
    key.write_text("agentrl" * 20)
    key.chmod(0o400)
    with mongod_with(folder, "--auth", "--keyFile", str(key)) as port:
        begin(f"mongodb://127.0.0.1:{port}/", port)
        yield port


def uri_of(port: int, user: str = "ada", password: str = PASSWORD) -> str:
    return (
        f"mongodb://{user}:{quote(password, safe='')}@127.0.0.1:{port}/demo"
        f"?authSource=admin&replicaSet=secured&{OPTIONS}"
    )


async def test_a_login_that_may_only_read_and_write_is_enough(guarded: int) -> None:
    uri = uri_of(guarded)
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.runs.create(Run(name="demo"))
        await fill(store, 1)
        assert quote(PASSWORD, safe="") not in store.redacted_uri
        assert (await store.reports.summary()).mean_score == 1.0
        assert await store.reports.run_names() == ["demo"]
    # A database of another release: this login may not change validators that exist.
    async with TrajectoryStore.connect(uri_of(guarded, "root")) as root:
        await root.database.handle.command("collMod", "records", validator={})
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        with pytest.raises(
            StoreError, match=r"does not authorize this login.* dbAdmin to delete it"
        ):
            await store.drop_database()


async def test_a_wrong_password_is_one_line_without_it(guarded: int) -> None:
    with pytest.raises(StoreError) as caught:
        async with TrajectoryStore.connect(uri_of(guarded, password="wr0ng")) as store:
            await store.runs.get()
    assert f"127.0.0.1:{guarded} refused the login; check user, password" in str(caught.value)
    assert "wr0ng" not in str(caught.value)
    with pytest.raises(StoreError, match="does not authorize this login"):
        async with TrajectoryStore.connect(uri_of(guarded), "other") as store:
            await store.runs.create(Run(name="other"))


async def test_a_missing_login_is_told_from_one_without_rights(guarded: int) -> None:
    with pytest.raises(StoreError, match="has no user and password; add USER:PASSWORD@ before"):
        async with TrajectoryStore.connect(f"mongodb://127.0.0.1:{guarded}/demo") as store:
            await store.runs.get()


def test_commands_never_print_a_password(
    guarded: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for action in (["inspect", "progress"], ["inspect", "runs"], ["store", "stats"]):
        for password in (PASSWORD, "wr0ng"):
            uri = uri_of(guarded, password=password)
            main([*action, "--run_name", "demo", "--db_connection_string", uri])
            printed = capsys.readouterr()
            assert password not in printed.out + printed.err
            assert quote(password, safe="") not in printed.out + printed.err


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A mongod that speaks TLS only; yields its port and the certificate to trust."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key, both = folder / "cert.pem", folder / "key.pem", folder / "both.pem"
    subprocess.run(
        [*OPENSSL, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    tls = ["--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(both)]
    tls += ["--tlsCAFile", str(certificate), "--tlsAllowConnectionsWithoutCertificates"]
    with mongod_with(folder, *tls) as port:
        begin(f"mongodb://127.0.0.1:{port}/", port, tls="true", tlsCAFile=str(certificate))
        yield port, certificate


async def test_tls_with_a_certificate_of_ones_own(encrypted: tuple[int, Path]) -> None:
    port, certificate = encrypted
    uri = f"mongodb://127.0.0.1:{port}/demo?replicaSet=secured&tls=true&{OPTIONS}"
    async with TrajectoryStore.connect(f"{uri}&tlsCAFile={certificate}") as store:
        await store.ensure_schema()
        await fill(store, 1)
        await store.drop_database()
    with pytest.raises(StoreError, match="is not trusted; check tlsCAFile"):
        async with TrajectoryStore.connect(uri, server_selection_timeout=1):
            pass


@pytest.fixture
def srv_host(mongod: EmbeddedMongo, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name whose SRV record points at the shared mongod, answered by a DNS server of our own."""
    name, target = "db.agentrl.test", "node.agentrl.test"
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            packet, sender = server.recvfrom(4096)
            if not packet:
                return
            query = dns.message.from_wire(packet)
            reply = dns.message.make_response(query)
            asked = query.question[0].name.to_text(omit_final_dot=True)
            if asked == f"_mongodb._tcp.{name}" and query.question[0].rdtype == 33:
                record = f"0 0 {mongod.port} {target}."
                reply.answer.append(dns.rrset.from_text(f"{asked}.", 60, "IN", "SRV", record))
            elif asked != name:
                reply.set_rcode(dns.rcode.NXDOMAIN)
            server.sendto(reply.to_wire(), sender)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for module, kind in ((dns.resolver, dns.resolver.Resolver),
                         (dns.asyncresolver, dns.asyncresolver.Resolver)):  # fmt: skip
        resolver = kind(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = server.getsockname()[1]
        monkeypatch.setattr(module, "default_resolver", resolver)
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: resolve("127.0.0.1" if host == target else host, *rest, **more),
    )
    yield name
    server.sendto(b"", server.getsockname())
    thread.join(5)
    server.close()


async def test_a_srv_name_is_resolved(srv_host: str, mongo_uri: str) -> None:
    database = mongo_uri.partition("?")[0].rpartition("/")[2]
    login = mongo_uri.partition("://")[2].partition("@")[0]
    options = "tls=false&replicaSet=rs0&authSource=admin"
    uri = f"mongodb+srv://{login}@{srv_host}/{database}?{options}"
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await fill(store, 1)
        shown = f"mongodb+srv://agentrl:***@{srv_host}/{database}?"
        assert store.redacted_uri.startswith(shown)
        await store.drop_database()


async def test_a_srv_name_that_does_not_exist_is_one_line(srv_host: str) -> None:
    uri = "mongodb+srv://ada:s3cret@nobody.agentrl.test/demo"
    with pytest.raises(StoreError) as caught:
        async with TrajectoryStore.connect(uri, server_selection_timeout=1):
            pass
    text = str(caught.value)
    assert "nobody.agentrl.test" in text
    assert "s3cret" not in text
    assert "\n" not in text
