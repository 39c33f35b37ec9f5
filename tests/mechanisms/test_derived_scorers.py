"""Scorers in weights that were trained without them begin as the model's own queries and keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.run.tiny_run import Run, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

GROUPS, WIDTH = 2, 8
"""Key/value heads of the small recipe, and the width of a head."""


def begun(run: Run, finished: Run, ranks: Ranks, count: int, kind: str, **options: Any) -> dict[str, Tensor]:
    """The checkpoint after one step that changes nothing, from the weights of `finished`."""
    run.recipe |= {"init_from": str(finished.run_dir), "checkpoint": {"every": 1}, "optim": {"lr": 1e-12}}
    sizes = {} if kind == "by_group" else {"block_size": 8, "topk": 3}
    run.recipe["attention"] = {"default": kind, "full_layers": "none", kind: sizes | options}
    run.recipe["model"]["rope"] = {"theta": 50000}
    run.recipe["stages"] = [{"name": "short", "seq_len": 64, "tokens": 512, "micro_batch_size": 2}]
    ranks.train(run, count)
    return checkpoint_tensors(run.newest_checkpoint)


@pytest.mark.parametrize("count", [1, 2], ids=["one rank", "weights in shards"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("msa", {}), ("msa", {"index_keys": "group"}), ("qsa", {})],
    ids=["msa", "msa, keys of groups", "qsa"],
)
def test_index_queries_are_those_of_the_group_and_index_keys_the_keys(
    kind: str, options: dict[str, Any], count: int, run: Run, finished_run: Run, ranks: Ranks
) -> None:
    found = begun(run, finished_run, ranks, count, kind, **options)
    base = checkpoint_tensors(finished_run.newest_checkpoint)
    for layer in range(2):
        before = f"model.blocks.{layer}.attention."
        queries, keys = (base[f"{before}{name}.weight"].unflatten(0, (-1, WIDTH)) for name in ("q_proj", "k_proj"))
        wanted = torch.stack([queries[group * 2 : group * 2 + 2].mean(0) for group in range(GROUPS)]).flatten(0, 1)
        torch.testing.assert_close(found[f"{before}{kind}.q_proj.weight"], wanted, atol=1e-7, rtol=0)
        wanted = keys.mean(0) if (kind, options) == ("msa", {}) else keys.flatten(0, 1)
        torch.testing.assert_close(found[f"{before}{kind}.k_proj.weight"], wanted, atol=1e-7, rtol=0)


@pytest.mark.parametrize("count", [1, 2], ids=["one rank", "weights in shards"])
def test_scorers_of_some_groups_are_those_of_these_groups(
    count: int, run: Run, finished_run: Run, ranks: Ranks
) -> None:
    part = {"groups": [1], "kind": "msa", "options": {"block_size": 8, "topk": 3, "index_keys": "group"}}
    found = begun(run, finished_run, ranks, count, "by_group", parts=[part])
    base = checkpoint_tensors(finished_run.newest_checkpoint)
    for layer in range(2):
        before = f"model.blocks.{layer}.attention."
        queries, keys = (base[f"{before}{name}.weight"].unflatten(0, (-1, WIDTH)) for name in ("q_proj", "k_proj"))
        for name, wanted in (("q_proj", queries[2:].mean(0)), ("k_proj", keys[1])):
            torch.testing.assert_close(found[f"{before}by_group.msa.{name}.weight"], wanted, atol=1e-7, rtol=0)


def test_a_narrower_scorer_begins_at_random(run: Run, finished_run: Run, ranks: Ranks) -> None:
    found = begun(run, finished_run, ranks, 1, "msa", index_dim=4)
    for name in ("q_proj", "k_proj"):
        assert 0.01 < found[f"model.blocks.0.attention.msa.{name}.weight"].std() < 0.04, "init_std is 0.02"
