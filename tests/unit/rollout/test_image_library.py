"""Rollouts that show images to a model, from the question and from tools."""

import base64
import ipaddress
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.scripted_engine import ScriptedEngine, serve_script
from harness.tiny_tokenizer import IMAGE_TOKEN, write_seeing_tokenizer
from support.attacks.addresses import PRIVATE
from support.play import begin_run, open_play, play, tool_call
from support.tool_server import picture

from agentrl.config.loading import build_config
from agentrl.config.sections import RolloutSection
from agentrl.errors import ConfigError, RenderError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import Conversation, RolloutResult, image_library
from agentrl.rollout.image_library import ImageLibrary
from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    rebuild_images,
    rebuild_prompts,
)
from agentrl.schema.image import image_part
from agentrl.store import TrajectoryStore

ANSWER = "<answer>7</answer>"


@pytest.mark.parametrize(
    "address",
    PRIVATE,
)
def test_no_way_of_writing_an_address_leads_to_a_private_network(address: str) -> None:
    assert not image_library._is_allowed(address, ())


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_public_addresses_may_be_connected_to(address: str) -> None:
    assert image_library._is_allowed(address, ())


def test_a_network_may_be_allowed_by_the_user() -> None:
    allowed = (ipaddress.ip_network("192.0.0.0/24"),)
    assert image_library._is_allowed("192.0.0.192", allowed)


LOOPBACK = (ip_network("127.0.0.1/32"),)


def url_of(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(number)).decode()}"


def task_with(*images: str) -> MCPTask:
    return MCPTask(id="train/0/q1", query="What is this?", answer="7", images=images)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_seeing_tokenizer(tmp_path_factory.mktemp("seeing")))


def assert_as_sent(turns: list[DispatchedSamplingTask], engine: ScriptedEngine) -> None:
    sent = [body["input_ids"] for body in engine.requests]
    assert [ids.tolist() for ids in rebuild_prompts(turns)] == sent
    assert [len(images) for images in rebuild_images(turns)] == [
        len(body.get("image_data", ())) for body in engine.requests
    ]


async def num_images_stored(store: TrajectoryStore) -> int:
    return await store.database["blobs"].count_documents({"kind": "image"})


def test_a_model_sees_where_its_files_name_a_placeholder(
    seeing: Renderer, renderer: Renderer
) -> None:
    assert seeing.shows_images_of("user")
    assert seeing.shows_images_of("tool")
    assert not renderer.shows_images_of("user")


async def test_images_of_questions_and_tools_reach_the_engine_in_their_order(
    store: TrajectoryStore, seeing: Renderer, tools_url: str
) -> None:
    script = [tool_call("picture", number=3) + tool_call("picture", number=1), ANSWER]
    with serve_script(seeing, lambda _: script.pop(0)) as engine:
        await begin_run(store, engine, task_with(url_of(1), url_of(2)))
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("answered", "7")
    assert [body["image_data"] for body in engine.requests] == [
        [url_of(1), url_of(2)],
        [url_of(1), url_of(2), url_of(3), url_of(1)],
    ]
    prompt = seeing.decode(engine.requests[1]["input_ids"])
    assert prompt.count("<|vision_start|><|image_pad|><|vision_end|>") == 4
    assert "<|vision_end|>What is this?" in prompt
    assert [result.content for result in turns[0].tool_results] == ["Look:", "Look:"]
    assert (turns[1].shared_images, len(turns[1].added_images)) == (2, 2)
    assert_as_sent(turns, engine)
    # Three different images, the first of them shown twice.
    assert await num_images_stored(store) == 3
    assert await store.images.get(turns[1].added_images) == await store.images.get(
        (rebuild_images(turns)[1][2], rebuild_images(turns)[0][0])
    )


async def test_an_image_of_a_question_is_shown_where_the_question_marks_it(
    store: TrajectoryStore, seeing: Renderer, tools_url: str
) -> None:
    task = task_with(url_of(1)).model_copy(update={"query": "Is <image> red?"})
    with serve_script(seeing, lambda _: ANSWER) as engine:
        await begin_run(store, engine, task)
        async with open_play(store, engine, tools_url) as context:
            _, turns = await play(store, context)
    prompt = seeing.decode(engine.requests[0]["input_ids"])
    assert "Is <|vision_start|><|image_pad|><|vision_end|> red?" in prompt
    assert_as_sent(turns, engine)


async def test_a_task_is_stored_with_the_addresses_of_its_images(store: TrajectoryStore) -> None:
    task = task_with(url_of(1), "https://example.org/a.png")
    await store.tasks.add([task, task.model_copy(update={"id": "train/1/q1"})])
    stored = await store.tasks.get("train/1/q1")
    assert isinstance(stored, MCPTask)
    assert stored.images[0].startswith("sha256:")
    assert stored.images[1] == "https://example.org/a.png"
    assert await num_images_stored(store) == 1


async def test_compacting_keeps_the_images_of_tasks_and_turns(
    store: TrajectoryStore, seeing: Renderer, tools_url: str
) -> None:
    script = [tool_call("picture", number=3), ANSWER]
    with serve_script(seeing, lambda _: script.pop(0)) as engine:
        second = task_with(url_of(2)).model_copy(update={"id": "train/0/q2", "order": 1})
        await begin_run(store, engine, task_with(url_of(1)), second)
        async with open_play(store, engine, tools_url) as context:
            await play(store, context)
    assert (await store.maintenance.plan_compaction()).unreferenced_blobs == 0
    assert await num_images_stored(store) == 3


async def test_so_many_images_of_tools_are_shown_and_the_others_said_to_be_left_out(
    store: TrajectoryStore, seeing: Renderer, tools_url: str
) -> None:
    script = [tool_call("picture", number=n) for n in range(3)] + [ANSWER]
    with serve_script(seeing, lambda _: script.pop(0)) as engine:
        await begin_run(store, engine, task_with())
        rollout = RolloutSection(max_images=2)
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            _, turns = await play(store, context)
    assert engine.requests[-1]["image_data"] == [url_of(0), url_of(1)]
    (last,) = turns[2].tool_results
    assert last.content == "Look:\n[1 of the images not shown: there were too many before]"
    assert_as_sent(turns, engine)


async def test_a_model_that_reads_text_is_told_of_images_and_gets_no_task_with_them(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    script = [tool_call("picture", number=3), ANSWER]
    with serve_script(renderer, lambda _: script.pop(0)) as engine:
        second = task_with(url_of(1)).model_copy(update={"id": "train/0/q2", "order": 1})
        await begin_run(store, engine, task_with(), second)
        async with open_play(store, engine, tools_url) as context:
            _, turns = await play(store, context)
            with pytest.raises(RenderError, match="the model's chat template cannot show"):
                await play(store, context)
    size = len(picture(3))
    assert turns[0].tool_results[0].content == f"Look:\n[image image/png, {size} bytes, not shown]"
    assert all("image_data" not in body for body in engine.requests)


def test_a_prompt_shares_no_token_with_another_image_in_the_same_place(seeing: Renderer) -> None:
    def asked(address: str) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "What is this?"}
        return [{"role": "user", "content": [image_part(address), text]}]

    first = Conversation(asked("sha256:a"))
    prompt = first.next_prompt(seeing)
    output = np.asarray(seeing.encode("I see."), dtype=np.int32)
    first.replied(0, np.concatenate([prompt.ids, output]), {"role": "assistant", "content": "x"})
    first.rewrite(asked("sha256:b"), "summary")
    other = first.next_prompt(seeing)
    assert other.ids.tolist() == prompt.ids.tolist()
    place = prompt.ids.tolist().index(seeing.image_token_id)
    assert (other.shared_len, other.shared_images) == (place, 0)
    assert other.added_images == ("sha256:b",)
    first.rewrite(asked("sha256:a"), "summary")
    same = first.next_prompt(seeing)
    assert (same.shared_len, same.shared_images) == (len(prompt.ids), 1)


def test_a_placeholder_in_foreign_text_stays_text(seeing: Renderer) -> None:
    message = {"role": "user", "content": f"{IMAGE_TOKEN} is a token"}
    assert seeing.image_token_id not in seeing.render([message])


class Pages(SimpleHTTPRequestHandler):
    """Files, and `/away?ADDRESS`, which leads to the address."""

    def do_GET(self) -> None:
        path, _, address = self.path.partition("?")
        if path != "/away":
            super().do_GET()
            return
        self.send_response(302)
        self.send_header("Location", address)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[str]:
    """A web server with an image and a page that is none."""
    (tmp_path / "image").write_bytes(picture(5))
    (tmp_path / "page").write_text("<html>no image</html>")
    handler = partial(Pages, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def test_an_image_on_the_web_is_fetched_once_within_limits(
    store: TrajectoryStore, pages: str
) -> None:
    library = ImageLibrary(store, 1000, LOOPBACK)
    twice = await library.keep([f"{pages}/image", f"{pages}/image"])
    assert twice[0] == twice[1]
    assert await library.inlined(twice) == (url_of(5), url_of(5))
    for address, expected in (
        (f"{pages}/page", "not PNG"),
        (f"{pages}/nothing", "404"),
        ("file:///etc/hostname", "not a data: URL or http"),
        ("http://127.0.0.1:1/x.png", "cannot be fetched"),
        ("data:image/png;base64,????", "not base64"),
    ):
        with pytest.raises(RenderError, match=expected):
            await library.keep([address])
    with pytest.raises(RenderError, match="larger than max_image_megabytes"):
        await ImageLibrary(store, 10, LOOPBACK).keep([f"{pages}/image"])
    with pytest.raises(RenderError, match="larger than max_image_megabytes"):
        await ImageLibrary(store, max_bytes=10).keep([url_of(1)])


async def test_an_image_address_leads_to_no_private_place(
    store: TrajectoryStore, pages: str
) -> None:
    port = pages.rpartition(":")[2]
    refused = "not a public address, and not in image_networks"
    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
        with pytest.raises(RenderError, match=refused):
            await ImageLibrary(store, 1000).keep([f"http://{host}:{port}/image"])
    library = ImageLibrary(store, 1000, LOOPBACK)
    metadata = "http://169.254.169.254/latest/meta-data"
    for address in (metadata, f"{pages}/away?{metadata}", f"{pages}/away?http://127.0.0.2:{port}/"):
        with pytest.raises(RenderError, match=refused):
            await library.keep([address])
    with pytest.raises(RenderError, match="cannot be fetched"):
        await library.keep([f"{pages}/away?file:///etc/hostname"])
    assert await num_images_stored(store) == 0


def test_networks_of_images_are_read() -> None:
    config = build_config({"image_networks": "10.0.0.0/8,fd00::/8"})
    assert config.rollout.image_networks == ("10.0.0.0/8", "fd00::/8")
    with pytest.raises(ConfigError, match="image_networks intranet: expected networks such as"):
        build_config({"image_networks": "intranet"})
