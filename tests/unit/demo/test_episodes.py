import copy
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, Qwen3ForCausalLM

from examples.shop.demonstrations import Habits
from examples.shop.episodes import Codec, Episode, demonstrate, play
from examples.shop.questions import split_questions
from examples.shop.server import CATALOGUE
from examples.shop.warm_start import WarmStart, imitate

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "demo"
TRAIN, _ = split_questions(0, 2000, 100)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(AutoTokenizer.from_pretrained(ASSETS / "model"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(ASSETS / "model")


def recomputed(model: PreTrainedModel, episode: Episode) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of all tokens but the first, in one dense pass, and which were sampled."""
    ids = torch.tensor([episode.ids])
    with torch.no_grad():
        logp = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    return logp, torch.tensor(episode.sampled[1:])


def test_a_demonstration_without_noise_is_always_right(codec: Codec) -> None:
    draw = random.Random(0)
    episodes = [demonstrate(codec, question, draw) for question in TRAIN[:100]]
    assert {episode.reward for episode in episodes} == {1.0}


def test_a_noisy_demonstration_is_often_wrong_but_well_formed(codec: Codec) -> None:
    draw = random.Random(0)
    episodes = [demonstrate(codec, question, draw, Habits()) for question in TRAIN[:400]]
    assert 0.25 < sum(episode.reward for episode in episodes) / 400 < 0.5
    assert {episode.num_turns for episode in episodes} == {3}


def test_only_what_the_assistant_wrote_is_marked_including_its_end_of_turn(codec: Codec) -> None:
    episode = demonstrate(codec, TRAIN[0], random.Random(1))
    pieces, current = [], []
    for token, flag in zip(episode.ids, episode.sampled, strict=True):
        if flag:
            current.append(token)
        elif current:
            pieces.append(str(codec.tokenizer.decode(current)))
            current = []
    pieces.append(str(codec.tokenizer.decode(current)))
    assert len(pieces) == episode.num_turns
    assert all(piece.endswith("<|im_end|>") for piece in pieces)
    assert all(piece.startswith("<tool_call>") for piece in pieces[:-1])
    assert pieces[-1].startswith("<answer>")


def test_sampled_logprobs_equal_those_recomputed_in_one_pass(
    codec: Codec, model: PreTrainedModel
) -> None:
    torch.manual_seed(0)
    episodes = play(model, codec, CATALOGUE, TRAIN[:12])
    for episode in episodes:
        logp, mask = recomputed(model, episode)
        stored = torch.tensor(episode.logprobs[1:])
        torch.testing.assert_close(logp[mask], stored[mask], atol=1e-4, rtol=0)


def test_a_step_of_the_warm_start_has_the_loss_of_whole_episodes(
    codec: Codec, model: PreTrainedModel
) -> None:
    questions, settings = TRAIN[:8], WarmStart(num_steps=1, num_bare_steps=0, num_episodes=3)
    draw = random.Random("demonstrations 7")
    total, count = 0.0, 0
    for _ in range(settings.num_episodes):
        episode = demonstrate(codec, draw.choice(questions), draw, Habits())
        logp, mask = recomputed(model, episode)
        total, count = total - logp[mask].sum().item(), count + int(mask.sum())
    losses: list[float] = []
    student = copy.deepcopy(model)
    imitate(
        student,
        codec,
        lambda draw: demonstrate(codec, draw.choice(questions), draw, Habits()),
        settings,
        seed=7,
        report=lambda _step, loss: losses.append(loss),
    )
    assert losses == [pytest.approx(total / count, rel=1e-4)]
    weight = "model.layers.1.self_attn.k_proj.weight"
    assert not torch.equal(student.state_dict()[weight], model.state_dict()[weight])


def test_the_warm_start_is_clearly_imperfect_and_knows_the_protocol(
    codec: Codec, model: PreTrainedModel
) -> None:
    torch.manual_seed(0)
    episodes = play(model, codec, CATALOGUE, random.Random(0).sample(TRAIN, 128))
    assert 0.2 < sum(episode.reward for episode in episodes) / 128 < 0.55
    answered = sum("<answer>" in codec.decode(episode.ids) for episode in episodes)
    assert answered > 0.9 * 128
