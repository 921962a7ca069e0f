"""Proxies of the environment: for services outside, never for this machine."""

import asyncio
import os
import subprocess
import sys

import httpx
import pytest

from agentrl.errors import ConfigError
from agentrl.runtime.http.http_clients import check_proxy, open_client, unreachable_reason
from agentrl.runtime.http.proxies import direct_to_this_machine

PROXY = "http://127.0.0.1:9"


def test_this_machine_is_added_to_what_no_proxy_stands_before() -> None:
    assert direct_to_this_machine({"PATH": "/bin", "http_proxy": "", "NO_PROXY": "a"}) == {}
    alone = direct_to_this_machine({"HTTP_PROXY": PROXY})
    assert alone == dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    more = direct_to_this_machine({"all_proxy": PROXY, "NO_PROXY": "example.org, localhost"})
    assert more["no_proxy"] == more["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1"


def test_a_command_and_what_it_starts_speak_to_this_machine_directly() -> None:
    asks = (
        "import httpx; print([k.pattern for k, v in httpx.Client()._mounts.items() if v is None])"
    )
    program = f"from agentrl.cli.main import main; main(['--version']); {asks}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ALL_PROXY": PROXY},
        capture_output=True,
        text=True,
    )
    assert "'all://127.0.0.1'" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        (
            "socks5://me:s3cret@127.0.0.1:9",
            r"pip install 'httpx\[socks\]'; install it, or unset the variable",
        ),
        ("shout://me:s3cret@127.0.0.1:9", "ALL_PROXY is not a proxy address; write http://H"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_a_mistake_of_one_line(
    proxy: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it was not installed.
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", proxy)
    for use in (open_client, check_proxy):
        with pytest.raises(ConfigError, match=said) as refused:
            use()
        assert "s3cret" not in str(refused.value)


def test_a_socks_proxy_is_named_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    assert "SOCKS proxy" in str(unreachable_reason("http://hub.example"))


def test_a_client_without_a_proxy_is_httpxs_own() -> None:
    client = open_client(timeout=3.0)
    assert client.timeout == httpx.Timeout(3.0)
    asyncio.run(client.aclose())
