import itertools

import numpy as np
import pytest
import torch

from agentrl.distributed import MeshShape
from agentrl.distributed.sharding import clip_gradients
from agentrl.errors import ConfigError


def test_ranks_share_the_work_as_their_places_on_the_mesh_say() -> None:
    shape = MeshShape.of(2 * 3 * 2 * 2 * 2, dp_replicate=2, cp=2, ep=2, tp=2)
    places = itertools.product(*map(range, shape.sizes))
    for rank, (_, replica, shard, context, experts, tensor) in enumerate(places):
        share = np.ravel_multi_index((replica, shard, experts), (2, 3, 2))
        assert shape.dp_rank_of(rank) == share
        assert shape.is_dp_leader(rank) == (context == tensor == 0)
    assert (shape.dp_shard, shape.dp_size, shape.world_size) == (3, 12, 48)


def test_ranks_that_do_not_fill_the_mesh_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 trainer rank.*multiple of 4"):
        MeshShape.of(6, cp=2, tp=2)


def test_gradients_are_scaled_down_to_the_norm_and_no_further() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 2.0)
    assert clip_gradients(parameters, 10.0) == pytest.approx(24**0.5)
    assert parameters[0].grad is not None
    assert torch.equal(parameters[0].grad, torch.full((3,), 2.0))
    assert clip_gradients(parameters, 1.0) == pytest.approx(24**0.5)
    assert clip_gradients(parameters, 1.0) == pytest.approx(1.0, rel=1e-5)


def test_gradients_that_are_not_finite_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([float("inf"), 1.0])
    assert clip_gradients([parameter], 1.0) == float("inf")
    assert parameter.grad[1] == 1.0


def test_the_last_stage_reports_for_its_share() -> None:
    shape = MeshShape.of(8, pp=2, tp=2)
    assert [shape.dp_rank_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [shape.is_dp_leader(rank) for rank in range(8)] == [False] * 4 + [True, False] * 2
    assert shape.dp_size == 2
