"""Sequences that show images: sampled tokens have the logprobs that the trainer computes."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.tiny_vision import picture, vision_checkpoint
from transformers import AutoConfig

from agentrl.data.batch import build_step
from agentrl.data.select import SelectedGroup
from agentrl.data.shown_images import PlacedImage
from agentrl.data.tokens import TurnTokens
from agentrl.models.load import load_policy
from agentrl.models.policy import target_logprobs
from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence
from agentrl.plugins.engine.http.http_errors import InvalidRequest
from agentrl.plugins.engine.http.prompt_images import PromptImages
from agentrl.renderers.renderer import Renderer

torch.set_num_threads(1)
FAMILIES = ("qwen3_vl", "qwen3_5", "gemma3")


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def play(engine: BatchScheduler, ids: np.ndarray, placed: tuple[PlacedImage, ...]) -> TokenSequence:
    """A reply without the token of an image, which would stand for none."""
    for seed in range(20):
        params = DrawParams(max_new_tokens=6, seed=seed)
        sequence = TokenSequence.start(f"{len(ids)}/{seed}", ids, params).showing(placed)
        engine.submit(sequence)
        while engine.has_work:
            engine.step()
        if not {placed[0].image.image_token_id, *placed[0].image.before} & {*sequence.output_ids}:
            return sequence
    raise AssertionError("the model sees images everywhere")


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
def test_logprobs_are_the_trainers_also_where_a_prefix_is_continued(checkpoint: Path) -> None:
    renderer = Renderer.load(checkpoint)
    image = {"type": "image_url", "image_url": {"url": "sha256:a"}}
    first = renderer.render([{"role": "user", "content": [image, {"type": "text", "text": "?"}]}])
    more = [
        renderer.render([{"role": "user", "content": content}])
        for content in ([image, image], "Why?", "")
    ]
    images = PromptImages(checkpoint, AutoConfig.from_pretrained(checkpoint), 512)
    model = load_model(checkpoint, torch.float32)
    limits = SchedulerLimits(4, 4, 512, 13, 1 << 24, 1 << 24)
    engine, turns = BatchScheduler(model, limits, "1"), []
    prompt, urls = np.asarray(first), [url(picture(1, 40, 16))]
    for number, added in enumerate(([], [url(picture(2)), url(picture(3))], [])):
        urls = urls + added
        ids, placed = images.show(prompt.tolist(), urls)
        done = play(engine, ids, placed)
        turns.append(
            TurnTokens(
                turn_id=str(number),
                record_id="r",
                chain=number,
                full_ids=np.concatenate([ids, done.output_ids]).astype(np.int32),
                num_prompt_tokens=len(ids),
                behavior_logprobs=np.array(done.output_logprobs, dtype=np.float32),
                versions=np.zeros(6, dtype=np.int32),
                images=placed,
            )
        )
        prompt = np.concatenate([prompt, done.output_ids, more[number]])
    policy = load_policy(checkpoint)
    group = SelectedGroup("t", ("r",), (1.0,), tuple(turns))
    step = build_step([group], policy_version=0, token_budget=10**6)
    ((batch,),) = step.micro_batches
    assert engine.num_cached > 0, "the last turn continues what the one before computed"
    found = target_logprobs(policy, batch.row).logprobs.detach().numpy()
    assert np.abs(found - batch.behavior_logprobs).max() <= 1e-4


@pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True)
def test_prompts_that_share_steps_are_computed_as_alone(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    images, model = PromptImages(checkpoint, config, 512), load_model(checkpoint, torch.float32)
    limits = SchedulerLimits(4, 4, 512, 7, 1 << 24, 1 << 24)

    def sequences() -> list[TokenSequence]:
        found = []
        for number in range(4):
            text = [70 + number] * (3 + 5 * number)
            prompt = [*text, config.image_token_id, *text, config.image_token_id, 65]
            ids, placed = images.show(prompt, [url(picture(1)), url(picture(2, 40, 16))])
            params = DrawParams(max_new_tokens=5, temperature=0.0)
            found.append(TokenSequence.start(str(number), ids, params).showing(placed))
        return found

    def played(*together: TokenSequence) -> list[float]:
        engine = BatchScheduler(model, limits, "1")
        engine.submit_all(together)
        while engine.has_work:
            engine.step()
        return [logprob for sequence in together for logprob in sequence.output_logprobs]

    alone = [logprob for sequence in sequences() for logprob in played(sequence)]
    assert played(*sequences()) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True)
def test_images_that_cannot_be_read_are_refused_in_one_line(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    images = PromptImages(checkpoint, config, 20)
    one = [config.image_token_id]
    bomb = bytearray(picture(1))
    bomb[16:24] = (30_000).to_bytes(4) * 2
    for prompt, given, reason in (
        (one, url(b"GIF89a" + b"\0" * 30), "image_data\\[0\\]: .*"),
        (one, url(bytes(bomb)), "30000 x 30000 pixels"),
        (one, url(picture(1)[:200]), "cannot be decoded"),
        (one, url(picture(1, 900, 3)), "aspect ratio"),
        (one, "data:text/html;base64,AAAA", "not PNG"),
        (one, "https://example.com/a.png", "not a base64 data: URL"),
        ([1] * 18 + one, url(picture(1)), "exceeds the context length of 20 positions"),
        ([1, 2], url(picture(1)), "1 images for 0 placeholders"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            images.show(prompt, [given])
        assert "\n" not in str(refused.value)
