"""What collectives send through which links follows the real order of the ranks."""

import pytest

from moba_train.config.mesh import MeshSizes
from moba_train.parallel.dims import rank_groups
from moba_train.parallel.links import LINKS, LinkedGroup, Traffic, linked_group

DIMENSIONS = [("pp",), ("dp_replicate",), ("dp_shard", "cp"), ("cp",), ("tp",)]


@pytest.mark.parametrize(
    "sizes",
    [MeshSizes(2, 2, 2, 2, 2), MeshSizes(1, 2, 4, 1, 4), MeshSizes(4, 1, 1, 2, 2), MeshSizes(2, 1, 2, 4, 1)],
    ids=str,
)
@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_a_group_has_as_many_ranks_in_a_node_as_the_meshs_groups_have(sizes: MeshSizes, per_node: int) -> None:
    if per_node % sizes.tp:
        pytest.skip("a tp group must not span nodes")
    for dimensions in DIMENSIONS:
        group = linked_group(sizes, per_node, *dimensions)
        for ranks in rank_groups(sizes, *dimensions):
            nodes = [rank // per_node for rank in ranks]
            assert group.ranks == len(ranks)
            assert {nodes.count(node) for node in nodes} == {group.in_node}, (dimensions, ranks)


def test_a_gather_between_nodes_enters_each_through_all_its_adapters() -> None:
    assert LinkedGroup(4, 4).gather(400.0) == Traffic(node=300.0)
    assert LinkedGroup(4, 2).gather(400.0) == Traffic(node=150.0, network=150.0)
    assert LinkedGroup(4, 1).gather(400.0) == Traffic(network=300.0)
    assert LinkedGroup(1, 1).gather_seconds(400.0, LINKS) == 0
    across = LinkedGroup(16, 8)
    seconds = across.gather_seconds(16e9, LINKS)
    assert seconds == pytest.approx(15e9 * 7 / 8 / 300e9 + 5e-6), (
        "seven of eight parts come from the node, and last longer"
    )
    assert across.gather_seconds(16e9, LINKS._replace(network=25e9)) == pytest.approx(15e9 / 8 / 25e9 + 5e-6)
