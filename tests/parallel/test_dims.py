"""Every rank number and group of a layout, against brute force; and the groups that torch is given."""

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.config.mesh import MeshSizes
from moba_train.parallel.dims import ParallelDims, coordinates, rank_groups
from moba_train.parallel.world import World

LAYOUTS = [
    MeshSizes(),
    MeshSizes(dp_shard=4),
    MeshSizes(dp_replicate=2, dp_shard=3),
    MeshSizes(cp=4, tp=2),
    MeshSizes(dp_replicate=2, dp_shard=2, cp=2, tp=2),
    MeshSizes(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2),
]
TIMEOUT = timedelta(seconds=77)


def brute_force(sizes: MeshSizes) -> list[MeshSizes]:
    """The coordinates of every rank: all that there are, in lexicographic order."""
    return [MeshSizes(*place) for place in itertools.product(*map(range, sizes))]


@pytest.fixture(params=LAYOUTS, ids=str)
def sizes(request: pytest.FixtureRequest) -> MeshSizes:
    return request.param


def test_ranks_are_numbered_row_by_row(sizes: MeshSizes) -> None:
    assert [coordinates(sizes, rank) for rank in range(sizes.ranks)] == brute_force(sizes)


@pytest.mark.parametrize("dimensions", [("cp",), ("tp",), ("dp_shard", "cp"), ("dp_replicate",), ("pp",)])
def test_a_group_differs_along_its_own_dimensions_only(sizes: MeshSizes, dimensions: tuple[str, ...]) -> None:
    everyone = brute_force(sizes)
    found = rank_groups(sizes, *dimensions)
    assert sorted(itertools.chain(*found)) == list(range(sizes.ranks))
    for group in found:
        (rest,) = {everyone[rank]._replace(**dict.fromkeys(dimensions, 0)) for rank in group}
        alike = [r for r, place in enumerate(everyone) if place._replace(**dict.fromkeys(dimensions, 0)) == rest]
        assert group == alike


def enter(rank: int, sizes: MeshSizes) -> World:
    """Be `rank` of a world whose other ranks never answer."""
    dist.init_process_group("fake", rank=rank, world_size=sizes.ranks, store=FakeStore())
    return World(rank, sizes.ranks, torch.device("cpu"), sizes.ranks, TIMEOUT, dist.HashStore())


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize("rank", [0, 5, 11])
def test_each_rank_is_in_the_groups_of_its_coordinates(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of 24 ranks; a stage with another cp keeps the weight mesh and only makes a new cp group."""
    sizes = MeshSizes(dp_replicate=2, dp_shard=3, cp=2, tp=2)
    made: list[tuple[int, timedelta]] = []
    create = dist.new_subgroups_by_enumeration

    def noting(groups: list[list[int]], timeout: timedelta) -> Any:
        made.append((len(groups[0]), timeout))
        return create(groups, timeout=timeout)

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", noting)
    world = enter(rank, sizes)
    try:
        dims = ParallelDims(sizes, world)
        own = coordinates(sizes, rank)
        everyone = brute_force(sizes)
        assert dims.mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp", "tp")
        assert tuple(dims.mesh.shape) == (2, 6, 2)
        varying = {"dp_replicate": ["dp_replicate"], "dp_shard_cp": ["dp_shard", "cp"], "tp": ["tp"]}
        for name, dimensions in varying.items():
            free = dict.fromkeys(dimensions, 0)
            want = [r for r, place in enumerate(everyone) if place._replace(**free) == own._replace(**free)]
            assert members(dims.mesh.get_group(name)) == want
        assert members(dims.layers_group) == list(range(24)), "of one pipeline stage"
        assert dims.weight_mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
        assert dims.tp_mesh is not None

        stage = dims.for_stage(sizes)
        assert (stage.dp_rank, stage.tp_rank) == (own.dp_replicate * 3 + own.dp_shard, own.tp)
        assert members(stage.cp_group) == [r for r, p in enumerate(everyone) if p._replace(cp=own.cp) == own]

        longer = sizes._replace(dp_shard=1, cp=6)
        wide = dims.for_stage(longer)
        place = coordinates(longer, rank)
        assert (wide.dp_rank, wide.tp_rank) == (place.dp_replicate, place.tp)
        assert members(wide.cp_group) == members(dims.mesh.get_group("dp_shard_cp")), "all shards of the weights"
        shorter = dims.for_stage(sizes._replace(dp_shard=6, cp=1))
        assert shorter.cp_group is None
        assert shorter.dp_rank == own.dp_replicate * 6 + own.dp_shard * 2 + own.cp

        groups = len(made)
        assert dims.for_stage(sizes).cp_group is stage.cp_group
        assert len(made) == groups, "groups are kept"
        assert {timeout for _, timeout in made} == {TIMEOUT}
    finally:
        dist.destroy_process_group()


def test_sequences_are_dealt_once_to_the_ranks_that_read_different_ones() -> None:
    """Over the ranks, (dp_rank, cp_rank, tp_rank) takes every combination once."""
    sizes = MeshSizes(dp_replicate=2, dp_shard=2, cp=3, tp=2)
    places = []
    for rank in range(sizes.ranks):
        world = enter(rank, sizes)
        try:
            stage = ParallelDims(sizes, world).for_stage(sizes)
            places.append((stage.dp_rank, members(stage.cp_group).index(rank), stage.tp_rank))
        finally:
            dist.destroy_process_group()
    assert sorted(places) == list(itertools.product(range(4), range(3), range(2)))


@pytest.mark.parametrize("pp", [2, 3])
def test_a_pipeline_joins_ranks_of_equal_places_and_ends_where_the_loss_is(pp: int) -> None:
    sizes = MeshSizes(pp=pp, dp_shard=2, cp=2, tp=2)
    for rank, own in enumerate(brute_force(sizes)):
        world = enter(rank, sizes)
        try:
            dims = ParallelDims(sizes, world)
            want = [other for other, place in enumerate(brute_force(sizes)) if place._replace(pp=own.pp) == own]
            assert members(dims.pipeline_group) == want
            assert members(dims.layers_group) == list(range(8 * own.pp, 8 * own.pp + 8))
            assert dims.for_stage(sizes).computes_loss == (own.pp == pp - 1)
            assert dims.weight_mesh.size() == 4
        finally:
            dist.destroy_process_group()


def test_dimensions_of_one_rank_take_no_group_of_their_own() -> None:
    sizes = MeshSizes(dp_shard=4)
    world = enter(1, sizes)
    try:
        dims = ParallelDims(sizes, world)
        assert dims.mesh.mesh_dim_names == ("dp_shard_cp",)
        assert dims.weight_mesh is dims.mesh
        assert dims.tp_mesh is None
    finally:
        dist.destroy_process_group()
