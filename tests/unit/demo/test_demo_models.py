"""The models that ship with the demos, as a run loads them."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from agentrl.config.command_line import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.datasets.question_files import load_questions
from agentrl.models.load import load_policy, read_config
from agentrl.models.policy import target_logprobs
from agentrl.models.vision.image_reader import ImageReader
from agentrl.plugins.sft.curriculum import Example, file_examples, sft_batch
from agentrl.renderers.renderer import Renderer
from agentrl.schema.image import content_with_images
from examples.maps.demonstrations import Habits, conversations
from examples.shop.demonstrations import Habits as ShopHabits
from examples.shop.episodes import Codec, demonstrate, episode_turns
from examples.shop.questions import split_questions

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "demo"
DEMOS = {"grpo": "model", "hybrid": "hybrid/model", "vision": "vision/model"}
NUM_TALKS = 12


def configuration(demo: str) -> RootConfig:
    return parse_flags(["--config", f"assets/demo/{demo}.yaml", "--run_name", "demo"])


def shop_examples(model: Path) -> list[Example]:
    codec, draw = Codec(AutoTokenizer.from_pretrained(model)), random.Random(5)
    questions, _ = split_questions(0, NUM_TALKS, 1)
    return [
        Example(str(n), tuple(episode_turns(demonstrate(codec, q, draw, ShopHabits()), str(n))))
        for n, q in enumerate(questions)
    ]


def map_examples(model: Path, folder: Path) -> list[Example]:
    talks = conversations(random.Random(5), NUM_TALKS, Habits(), described=0.0)
    file = folder / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    return file_examples(file, Renderer.load(model), ImageReader(read_config(model), model))


@pytest.mark.parametrize("demo", DEMOS)
def test_the_configuration_names_files_that_ship(
    demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration(demo)
    assert config.model.model_name_or_path == str(ASSETS / DEMOS[demo])
    assert config.data.train_file is not None
    assert config.data.eval_file is not None
    asked = load_questions(config.data.train_file, config.data)
    needed = config.trainer.max_steps * (config.trainer.groups_per_step or 0)
    # A good policy's groups often succeed as a whole, and others take their places.
    assert len(asked) * config.data.num_train_epochs >= 4 * needed
    assert {question.scorer for question in asked} == {"exact"}
    assert all(len(question.images) == (demo == "vision") for question in asked)
    assert load_questions(config.data.eval_file, config.data)


def test_a_shipped_folder_of_a_demo_stays_under_8_megabytes() -> None:
    for folder in ("model", "hybrid", "vision"):
        files = [path for path in (ASSETS / folder).rglob("*") if path.is_file()]
        assert 1_000_000 < sum(path.stat().st_size for path in files) < 8_000_000, folder


def test_the_vision_demo_shows_its_map_once_before_the_question() -> None:
    config = configuration("vision")
    assert config.data.train_file is not None
    question = load_questions(config.data.train_file, config.data)[0]
    renderer = Renderer.load(ASSETS / "vision/model")
    ids = renderer.render(
        [{"role": "user", "content": content_with_images(question.query, question.images)}]
    )
    (place,) = (ids == renderer.image_token_id).nonzero()[0].tolist()
    assert renderer.decode(ids[place + 1 :]).startswith(f"<|vision_end|>{question.query}<|im_end|>")


@pytest.mark.parametrize("demo", DEMOS)
def test_a_shipped_model_expects_what_its_demonstrators_do(demo: str, tmp_path: Path) -> None:
    model = ASSETS / DEMOS[demo]
    examples = map_examples(model, tmp_path) if demo == "vision" else shop_examples(model)
    batch = sft_batch(examples, token_budget=1 << 20, num_ranks=1)
    ((row,),) = batch.micro_batches
    with torch.no_grad():
        found = target_logprobs(load_policy(model), row.row).logprobs
    # In a whole conversation, some two choices among two to eight are open.
    assert float(-found.mean()) < 0.25
