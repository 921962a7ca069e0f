"""Measures the effects of hostile requests on a served engine, and on an agent's endpoint."""

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness.apart import Meter, PeakMemory, apart
from harness.attacks.hostile_requests import (
    CALLS,
    CALLS_WITH_SCHEMAS,
    CHAT,
    KILLERS,
    PAGES,
    PROMPTS,
    SAMPLING,
    reference_chain,
)
from harness.processes import engine_process
from harness.scripted_engine import serve_script
from harness.server_heartbeats import kept_registered
from rollout_play import MODEL, open_store
from tokenizers import Tokenizer

from agentrl.config.sections import AgentSection, RolloutSection, SamplingSection
from agentrl.inference import ServerPool
from agentrl.plugins.engine.generation.grammar_trial import GrammarTrial
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import RolloutContext
from agentrl.rollout.agent import AgentEndpointServer, AgentSampler
from agentrl.schema import InferenceService, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint
from agentrl.schema.grammar import Grammar
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.tools import ToolsConfig, connect_tools

JSON = {"Content-Type": "application/json"}
WELL = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
CONTROL = ("pause_generation", "update_weight_version", "update_weights_from_disk", "abort_request")
NUM_HALF_SENT = 3_000
PATIENCE_SECONDS = 60.0


def engine() -> dict[str, dict[str, Any]]:
    """Return the figures of each attack on a served engine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65_536), most))
    with engine_process(MODEL) as url:
        (process,) = [
            one
            for one in psutil.Process().children(recursive=True)
            if "agentrl.plugins.engine" in one.cmdline() and "--port" in one.cmdline()
        ]
        found = asyncio.run(_attack(url, process.pid))
        assert process.is_running()
    return found | {"grammars": grammars()}


async def _attack(url: str, pid: int) -> dict[str, dict[str, Any]]:
    timeout = httpx.Timeout(PATIENCE_SECONDS)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False) as http:
        await _generate(http)
        return {
            "numbers": await _refusals(http, [_with_sampling(text) for text in SAMPLING]),
            "prompts": await _refusals(http, [*map(_utf8, PROMPTS)]),
            "schemas": await _refusals(http, [*map(_with_grammar, _SENT_GRAMMARS)]),
            "pages": await _pages(http),
            "large": await _large(http, pid),
            "half_sent": await _half_sent(http),
        }


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _with_sampling(text: str) -> bytes:
    return _utf8(f'{{"input_ids": [1, 2, 3], "sampling_params": {text}}}')


_SENT_GRAMMARS = (
    *KILLERS,
    Grammar(kind="json_schema", text=reference_chain(1_000) + " " * 100_000),
)


def _with_grammar(grammar: Grammar) -> bytes:
    return _with_sampling(json.dumps({grammar.kind: grammar.text}))


async def _generate(http: httpx.AsyncClient) -> float:
    started = time.monotonic()
    answer = await http.post("/generate", json=WELL)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - started


async def _refusals(http: httpx.AsyncClient, bodies: list[bytes]) -> dict[str, Any]:
    """Send each body, and a well-formed one after it."""
    statuses, slowest = [], 0.0
    for body in bodies:
        started = time.monotonic()
        answer = await http.post("/generate", content=body, headers=JSON)
        slowest = max(slowest, time.monotonic() - started)
        statuses.append(answer.status_code)
        await _generate(http)
    return {
        "tried": len(bodies),
        "refused": statuses.count(400),
        "num_500": sum(status >= 500 for status in statuses),
        "seconds": round(slowest, 2),
    }


async def _pages(http: httpx.AsyncClient) -> dict[str, Any]:
    statuses = [
        (await http.post(f"/{route}", content=b"{}", headers=headers)).status_code
        for route in CONTROL
        for headers, _ in PAGES
    ]
    await _generate(http)
    return {
        "tried": len(statuses),
        "refused": sum(status in (403, 415, 421) for status in statuses),
    }


async def _large(http: httpx.AsyncClient, pid: int) -> dict[str, Any]:
    """Send 20 MB of text while another client samples."""
    body = json.dumps({"text": "a " * 10_000_000}).encode()
    peak, waits = PeakMemory(pid), []
    sending = asyncio.create_task(http.post("/generate", content=body, headers=JSON))
    while not sending.done():
        waits.append(await _generate(http))
    answer = await sending
    return {
        "status": answer.status_code,
        "megabytes": peak.megabytes(),
        "neighbour_seconds": round(max(waits), 3),
    }


async def _half_sent(http: httpx.AsyncClient) -> dict[str, Any]:
    """Open thousands of incomplete requests, and wait until the server has closed all of them."""
    port = http.base_url.port
    assert port is not None
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"
    started = time.monotonic()
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_HALF_SENT)]
    for _, writer in opened:
        writer.write(head)
    wait = await _generate(http)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(reader.read() for reader, _ in opened))
    seconds = time.monotonic() - started
    for _, writer in opened:
        writer.close()
    return {
        "tried": NUM_HALF_SENT,
        "seconds": round(seconds, 1),
        "neighbour_seconds": round(wait, 3),
    }


def grammars() -> dict[str, Any]:
    """Return the seconds until each lethal grammar is refused, and whether others compile after it."""
    file = MODEL / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    trial = GrammarTrial(file, tokenizer.get_vocab_size(with_added_tokens=True), frozenset({0}))
    durations, refused = [], 0
    try:
        for grammar in KILLERS:
            started = time.monotonic()
            try:
                trial.check(grammar)
            except ValueError:
                refused += 1
            durations.append(round(time.monotonic() - started, 2))
            trial.check(Grammar(kind="regex", text="[ab]{4}"))
    finally:
        trial.close()
    return {"tried": len(KILLERS), "refused": refused, "seconds": max(durations)}


# --- an agent's endpoint ----------------------------------------------------------------------


def endpoint() -> dict[str, dict[str, Any]]:
    """Return the figures of each attack on an agent's endpoint, in a sampler's process."""
    return {
        "user_text": apart(_user_text),
        "malformed": apart(_malformed),
        "schemas": apart(_schemas),
    }


async def _malformed(meter: Meter) -> dict[str, Any]:
    return await _post_all(meter, CALLS)


async def _schemas(meter: Meter) -> dict[str, Any]:
    return await _post_all(meter, CALLS_WITH_SCHEMAS)


async def _user_text(meter: Meter) -> dict[str, Any]:
    messages = [{"role": "user", "content": "word " * 12_000_000}]
    return await _post_all(meter, [json.dumps(CHAT | {"messages": messages})])


async def _post_all(meter: Meter, bodies: Sequence[str]) -> dict[str, Any]:
    """Let an agent send bodies, and an ordinary call after each."""
    statuses: list[int] = []
    sent = [body.encode() for body in bodies]

    async def agent(_: MCPTask, at: AgentEndpoint) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as http:
            with meter:
                for body in sent:
                    route = "completions" if b'"prompt"' in body else "chat/completions"
                    answer = await http.post(f"{at.base_url}/{route}", content=body, headers=JSON)
                    statuses.append(answer.status_code)
                    alive = await http.post(f"{at.base_url}/chat/completions", json=CHAT)
                    assert alive.status_code == 200, alive.text
        return "7"

    async with _stage() as (context, endpoints):
        claimed = await context.store.records.claim(
            "bench", lease_seconds=600, admitted_groups=1000, max_attempts=3
        )
        assert claimed is not None
        record, task = claimed
        assert isinstance(task, MCPTask)
        sampler = AgentSampler(task, record, context, agent=agent, endpoints=endpoints)
        result = await sampler.run()
        await sampler.finish()
    return {
        "tried": len(bodies),
        "refused": sum(status in (400, 413) for status in statuses),
        "num_400": statuses.count(400),
        "num_500": sum(status >= 500 for status in statuses),
        "outcome": result.outcome,
    }


@asynccontextmanager
async def _stage() -> AsyncIterator[tuple[RolloutContext, AgentEndpointServer]]:
    renderer = Renderer.load(MODEL)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongo(Path(folder) / "mongo") as mongo,
        serve_script(renderer, lambda _: "hm") as scripted,
    ):
        server = InferenceService(
            id="scripted", base_url=scripted.base_url, backend="embedded", model_path="m"
        )
        async with (
            open_store(mongo) as store,
            kept_registered(store, server),
            ServerPool() as servers,
            connect_tools(ToolsConfig(servers={})) as toolbox,
            AgentEndpointServer.open(AgentSection(), "m") as endpoints,
        ):
            servers.update([server])
            task = MCPTask(id="train/0/q1", query="?", answer="7", scorer="exact")
            await store.tasks.add([task])
            yield (
                RolloutContext(
                    store=store,
                    servers=servers,
                    renderer=renderer,
                    toolbox=toolbox,
                    scoring=RegisteredScoring(),
                    rollout=RolloutSection(max_turns=1_000),
                    sampling=SamplingSection(max_new_tokens=24, max_prompt_tokens=500),
                ),
                endpoints,
            )


if __name__ == "__main__":
    print(json.dumps({"engine": engine(), "endpoint": endpoint()}, indent=1))
