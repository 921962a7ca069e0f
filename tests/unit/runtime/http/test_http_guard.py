"""Requests as web pages send them, and as our clients do."""

import httpx
import pytest
from harness.attacks.hostile_requests import PAGES
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from agentrl.runtime.http.http_guard import HttpGuard

JSON = {"Content-Type": "application/json"}


async def _paused(_: Request) -> Response:
    return PlainTextResponse("paused")


def client(listens_on: str, asked_as: str = "127.0.0.1:30000") -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/pause", _paused, methods=["GET", "POST"])])
    transport = httpx.ASGITransport(HttpGuard(app, listens_on))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{asked_as}")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *PAGES,
        (JSON, 200),
        (JSON | {"Origin": "http://127.0.0.1:30000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/scim+json", "Host": "localhost:30000"}, 200),
    ],
)
async def test_a_web_page_cannot_post(headers: dict[str, str], status: int) -> None:
    async with client("127.0.0.1") as http:
        answer = await http.post("/pause", content=b"{}", headers=headers)
    assert answer.status_code == status


async def test_no_second_host_hides_a_foreign_one() -> None:
    async with client("127.0.0.1") as http:
        hosts = [("Host", "evil.example"), ("Host", "127.0.0.1:30000")]
        assert (await http.get("/pause", headers=hosts)).status_code == 421


async def test_a_web_page_cannot_get_either() -> None:
    async with client("127.0.0.1") as http:
        assert (await http.get("/pause")).status_code == 200
        assert (await http.post("/pause")).status_code == 200  # no body, so no type
        page = {"Sec-Fetch-Site": "cross-site"}  # <img src=...>, which sends no Origin
        assert (await http.get("/pause", headers=page)).status_code == 403


async def test_beyond_loopback_any_name_is_right_and_pages_are_not() -> None:
    async with client("0.0.0.0", "gpu7.cluster:30000") as http:
        assert (await http.get("/pause")).status_code == 200
        assert (await http.get("/pause", headers={"Origin": "http://evil"})).status_code == 403
    async with client("::1", "[::1]:30000") as http:
        assert (await http.get("/pause")).status_code == 200


def test_plain_http_beyond_this_machine_is_said(caplog: pytest.LogCaptureFixture) -> None:
    HttpGuard(Starlette(), "127.0.0.1")
    assert caplog.records == []
    HttpGuard(Starlette(), "10.0.0.7")
    assert "listening on 10.0.0.7 over plain HTTP" in caplog.text
