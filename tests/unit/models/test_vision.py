"""Models that read images: trees of turns train as each turn does through plain transformers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.random_groups import random_group
from harness.tiny_vision import (
    TEXT_VOCABULARY,
    VISION_FAMILIES,
    shown_pictures,
    vision_model,
)
from harness.trees import flat_gradient, relative_error
from PIL import Image as PillowImage
from transformers import AutoImageProcessor, PreTrainedModel

from agentrl.data import rows
from agentrl.data.batch import MicroBatch, build_step
from agentrl.data.select import SelectedGroup
from agentrl.data.shown_images import PlacedImage, RowImages, ShownImage, rotary_positions
from agentrl.data.tokens import TurnTokens
from agentrl.models.attention import layout
from agentrl.models.attention.attention_registry import TREE_ATTENTION, set_attention
from agentrl.models.load import wrap_policy
from agentrl.models.policy import ChunkedPass, PolicyModel, target_logprobs
from agentrl.models.rows.row_chunks import cut_row
from agentrl.models.unrounded import unrounded

torch.set_num_threads(1)
Plant = Callable[[pytest.MonkeyPatch], None]


def image_group(family: str, seed: int = 3) -> SelectedGroup:
    """Three records whose prompts show images, among them two of the same size in one place."""
    return random_group(
        np.random.default_rng(seed),
        vocabulary=TEXT_VOCABULARY,
        num_records=3,
        num_turns=3,
        images=shown_pictures(family),
    )


def weight_of(turn: TurnTokens) -> torch.Tensor:
    return torch.arange(1, turn.num_targets + 1).double() * turn.advantage


def plain_loss(model: PreTrainedModel, turn: TurnTokens, family: str, folder: str) -> torch.Tensor:
    """A turn's loss by transformers alone: its masks, positions, image processor and encoder."""
    ids = torch.from_numpy(turn.full_ids.astype(np.int64))[None]
    kinds = torch.zeros_like(ids)
    given = {}
    if turn.images:
        with open(f"{folder}/preprocessor_config.json", "w") as file:
            json.dump(VISION_FAMILIES[family][1], file)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        pictures = [PillowImage.open(BytesIO(placed.image.data)) for placed in turn.images]
        given = dict(processor(images=pictures, return_tensors="pt"))
        for name in ("num_crops", "num_soft_tokens_per_image"):
            given.pop(name, None)
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
        for placed in turn.images:
            kinds[:, placed.start : placed.end] = 1
        given["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = kinds
    logits = model(input_ids=ids, use_cache=False, **given).logits[0] / float(
        np.float32(turn.temperature)
    )
    first = turn.num_prompt_tokens - 1
    chosen = logits.log_softmax(-1)[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]
    loss: torch.Tensor = (weight_of(turn) * chosen).sum()
    return loss


def plain_gradient(family: str, group: SelectedGroup, folder: str, **changes: Any) -> torch.Tensor:
    model = vision_model(family, **changes).eval()
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for turn in group.turns:
        plain_loss(model, turn, family, folder).backward()
    return flat_gradient(model)


def packed_gradient(
    policy: PolicyModel,
    group: SelectedGroup,
    batches: Sequence[MicroBatch],
    turn_ids: Sequence[str],
) -> torch.Tensor:
    policy.zero_grad(set_to_none=True)
    weights = {turn.turn_id: weight_of(turn) for turn in group.turns}
    for batch in batches:
        counts: dict[int, int] = {}
        each = []
        for number in batch.turns.tolist():
            each.append(weights[turn_ids[number]][counts.get(number, 0)])
            counts[number] = counts.get(number, 0) + 1
        wanted = torch.stack(each)
        if batch.num_chunks == 1:
            (target_logprobs(policy, batch.row).logprobs * wanted).sum().backward()
        else:
            passes = ChunkedPass(policy, batch.row, num_chunks=batch.num_chunks)
            passes.forward()
            passes.backward(wanted)
    return flat_gradient(policy.model)


def largest_error(
    family: str, group: SelectedGroup, expected: torch.Tensor, token_budgets: Sequence[int]
) -> float:
    """Largest relative error of the gradient over rows, bins and chunks."""
    model = vision_model(family)
    set_attention(model, TREE_ATTENTION)
    policy, errors = wrap_policy(model), []
    for token_budget in token_budgets:
        step = build_step([group], policy_version=3, token_budget=token_budget)
        found = packed_gradient(policy, group, step.micro_batches[0], step.turn_ids)
        errors.append(relative_error(found, expected))
    return max(errors)


EVERYWHERE = ("qwen3_vl", "gemma3")
"""Rows and columns with features in several layers; images that see themselves whole."""
ROW, BINS, CHUNKS = 10**6, 40, 12


@pytest.mark.filterwarnings("ignore:.*falling back to its reference PyTorch implementation")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in EVERYWHERE else pytest.mark.slow)
        for family in VISION_FAMILIES
    ],
)
def test_trees_with_images_train_as_turns_by_plain_transformers_do(
    family: str, tmp_path: Path
) -> None:
    with unrounded(torch.float64):
        group = image_group(family)
        expected = plain_gradient(family, group, str(tmp_path))
        assert largest_error(family, group, expected, (ROW, BINS, CHUNKS)) <= 1e-12


def test_packings_of_images_are_rows_bins_and_chunks() -> None:
    group = image_group("qwen3_vl")
    row, bins, chunks = (
        build_step([group], policy_version=3, token_budget=budget).micro_batches[0]
        for budget in (ROW, BINS, CHUNKS)
    )
    assert [one.num_chunks for one in row] == [1]
    assert len(bins) > 1
    assert max(one.num_chunks for one in chunks) > 1
    assert row[0].row.images is not None
    assert len(row[0].row.images.images) < len(row[0].row.images.starts), "each is encoded once"


def has_two_in_one_place(group: SelectedGroup) -> bool:
    """Whether the same tokens show one image to one record and another to another."""
    shown: dict[bytes, set[str]] = {}
    for turn in group.turns:
        for placed in turn.images[:1]:
            path = turn.full_ids[: placed.end].tobytes()
            shown.setdefault(path, set()).add(placed.image.key)
    return any(len(keys) > 1 for keys in shown.values())


def of_another_branch(patch: pytest.MonkeyPatch) -> None:
    """M-RoPE: positions as if the images of the branch before were shown."""
    before: list[Sequence[PlacedImage]] = [()]

    def mistaken(length: int, images: Sequence[PlacedImage]) -> np.ndarray:
        before.append(images)
        return rotary_positions(length, before[-2])

    patch.setattr(rows, "rotary_positions", mistaken)


def of_another_record(patch: pytest.MonkeyPatch) -> None:
    """The tree takes images for equal because their tokens are."""

    def by_length(turns: Sequence[TurnTokens]) -> dict[str, int]:
        shown = [placed.image for turn in turns for placed in turn.images]
        return {image.key: -image.num_positions for image in shown}

    patch.setattr(rows, "_image_numbers", by_length)


def shown_in_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    laid_down = RowImages.of

    def swapped(placed: Sequence[tuple[int, ShownImage]]) -> RowImages | None:
        found = laid_down(placed)
        return found and replace(found, which=found.which[::-1].copy())

    patch.setattr(RowImages, "of", swapped)


def seen_causally(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layout, "whole_images", lambda _row: np.empty((0, 2), dtype=np.int64))


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("qwen3_vl", of_another_branch),
        ("qwen3_vl", of_another_record),
        ("gemma3", of_another_record),
        ("gemma3", shown_in_the_wrong_place),
        ("gemma3", seen_causally),
    ],
)
def test_mistaken_images_move_the_gradient(
    family: str, plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(50)
    group = next(g for g in (image_group(family, s) for s in seeds) if has_two_in_one_place(g))
    expected = plain_gradient(family, group, str(tmp_path))
    plant(monkeypatch)
    assert largest_error(family, group, expected, (ROW,)) > 1e-3


def test_a_chunk_that_ends_within_an_image_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group = image_group("qwen3_vl")
    ((batch,),) = build_step([group], policy_version=3, token_budget=ROW).micro_batches
    images = batch.row.images
    assert images is not None
    for num_chunks in range(2, 40):
        for chunk in cut_row(batch.row, num_chunks):
            inside = [] if chunk is None else [s < chunk.start < e for s, e in images.spans]
            assert not any(inside)
    monkeypatch.setattr(RowImages, "spans", np.empty((0, 2), dtype=np.int64))
    model = vision_model("qwen3_vl")
    set_attention(model, TREE_ATTENTION)
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        ChunkedPass(wrap_policy(model), batch.row, num_chunks=30).forward()


def test_an_image_longer_than_the_window_is_computed_by_blocks(tmp_path: Path) -> None:
    family = "gemma3"
    text = {**VISION_FAMILIES[family][0]["text_config"], "sliding_window": 3}
    with unrounded(torch.float64):
        group = image_group(family)
        expected = plain_gradient(family, group, str(tmp_path), text_config=text)
        model = vision_model(family, text_config=text)
        set_attention(model, TREE_ATTENTION)
        step = build_step([group], policy_version=3, token_budget=ROW)
        policy = wrap_policy(model)
        found = packed_gradient(policy, group, step.micro_batches[0], step.turn_ids)
        assert relative_error(found, expected) <= 1e-12


def test_a_stand_in_changes_nothing_but_reaches_the_whole_encoder() -> None:
    group = image_group("qwen3_vl", seed=1)
    bare = replace(group, turns=tuple(turn for turn in group.turns if not turn.images))
    assert bare.turns
    model = vision_model("qwen3_vl")
    set_attention(model, TREE_ATTENTION)
    policy = wrap_policy(model)
    ((batch,),) = build_step([bare], policy_version=3, token_budget=ROW).micro_batches
    encoder = [p for name, p in model.named_parameters() if ".visual." in name]
    logprobs = target_logprobs(policy, batch.row).logprobs
    row = replace(batch.row, stand_in=shown_pictures("qwen3_vl")[0])
    found = target_logprobs(policy, row).logprobs
    assert torch.equal(found, logprobs)
    found.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in encoder)


def test_a_step_of_several_ranks_lets_all_of_them_encode() -> None:
    group = image_group("qwen3_vl")
    step = build_step([group], policy_version=3, token_budget=BINS, num_ranks=3)
    rows = [batch.row for share in step.micro_batches for batch in share]
    assert any(row.images is None for row in rows) or len(rows) > 0
    smallest = min(image.num_positions for image in shown_pictures("qwen3_vl"))
    assert all(row.stand_in is not None for row in rows)
    assert {row.stand_in.num_positions for row in rows if row.stand_in} == {smallest}
    alone = build_step([group], policy_version=3, token_budget=BINS)
    assert all(batch.row.stand_in is None for batch in alone.micro_batches[0])
