"""Who is sent the keys of a run: servers whose supervisor has them, and no strangers."""

import asyncio

import pytest
from pydantic import SecretStr

from agentrl.inference.client.pool import ServerPool
from agentrl.inference.server_keys import proof, with_control_key, with_data_key
from agentrl.schema import InferenceService

KEY = SecretStr("the key of the data routes")


def registered(url: str, data_proof: str | None = None) -> InferenceService:
    return InferenceService(
        id=url, base_url=url, backend="embedded", model_path="m", data_proof=data_proof
    )


async def test_a_stranger_in_the_database_is_sent_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    async with stranger, ServerPool(api_key=KEY) as pool:
        copied = proof("http://127.0.0.1:1", KEY)  # from the registration of an honest server
        pool.update([registered(f"http://127.0.0.1:{port}", copied)])
        assert pool.num_servers == 0
        pool.update([registered("http://127.0.0.1:1", copied)])
        assert pool.num_servers == 1
    assert asked == []
    assert "is ignored: the process that registered it does not have this run's key" in caplog.text


def test_each_key_has_a_proof_of_its_own_and_without_keys_none_is_wanted() -> None:
    service = registered("http://h:1", proof("http://h:1", KEY))
    assert with_data_key([service], KEY) == [service]
    assert with_control_key([service], KEY) == []
    without = registered("http://h:1")
    assert with_data_key([without], None) == [without]
