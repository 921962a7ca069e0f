"""Prompts rebuilt from what each turn added, and versions from spans."""

import numpy as np
import pytest

from agentrl.schema import (
    DispatchedSamplingTask,
    SamplingParams,
    Seat,
    VersionSpan,
    rebuild_images,
    rebuild_prompts,
    token_versions,
)


def turn(
    index: int,
    parent: int | None,
    shared_len: int,
    added: list[int],
    output: list[int],
    spans: tuple[VersionSpan, ...] = (),
) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=f"t/{index}",
        record_id="r",
        task_id="t",
        attempt=1,
        index=index,
        parent=parent,
        shared_len=shared_len,
        added_ids=added,
        output_ids=output,
        output_logprobs=[-1.0] * len(output),
        version_spans=spans,
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )


def test_lists_become_arrays_of_the_stored_types() -> None:
    made = turn(0, None, 0, [1, 2], [3])
    assert made.added_ids.dtype == np.int32
    assert made.output_ids.dtype == np.int32
    assert made.output_logprobs.dtype == np.float32


def test_prompts_follow_chains_branches_and_fresh_contexts() -> None:
    turns = [
        turn(0, None, 0, [1, 2, 3], [10, 11]),
        turn(1, 0, 5, [4], [12]),
        turn(2, 0, 4, [5, 6], [13]),  # branches inside the parent's output
        turn(3, None, 0, [7], [14]),
        turn(4, 1, 2, [], [15]),
        turn(5, 3, 1, [8], [16]),  # the first to continue its parent, without the last token
    ]
    assert [prompt.tolist() for prompt in rebuild_prompts(turns)] == [
        [1, 2, 3],
        [1, 2, 3, 10, 11, 4],
        [1, 2, 3, 10, 5, 6],
        [7],
        [1, 2],
        [7, 8],
    ]
    assert all(prompt.dtype == np.int32 for prompt in rebuild_prompts(turns))


def test_a_prompt_shows_the_images_that_it_shares_and_those_that_it_adds() -> None:
    shown = [(("a", "b"), 0), (("c",), 1), ((), 2)]
    turns = [
        turn(index, index - 1 if index else None, index, [1], [2]).model_copy(
            update={"added_images": added, "shared_images": shared}
        )
        for index, (added, shared) in enumerate(shown)
    ]
    assert rebuild_images(turns) == [("a", "b"), ("a", "c"), ("a", "c")]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (turn(1, 1, 0, [], [1]), "its parent 1 does not precede it"),
        (turn(1, -1, 0, [], [1]), "its parent -1 does not precede it"),
        (turn(1, 0, 4, [], [1]), "shares 4 tokens of a parent that has 3"),
        (turn(2, 0, 3, [], [1]), "expected index 1, found 2"),
    ],
)
def test_turns_that_do_not_fit_together_are_refused(
    second: DispatchedSamplingTask, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rebuild_prompts([turn(0, None, 0, [1, 2], [3]), second])


def test_every_token_has_the_version_of_its_span() -> None:
    spans = (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=5))
    versions = token_versions(turn(0, None, 0, [1], [1, 2, 3, 4, 5], spans))
    assert versions.tolist() == [3, 3, 4, 4, 4]


def test_a_seat_that_an_earlier_release_stored_keeps_its_stint() -> None:
    assert Seat.model_validate({"name": "b", "run": 2}) == Seat(name="b", stint=2)
    assert Seat(name="b", stint=2).model_dump()["stint"] == 2
