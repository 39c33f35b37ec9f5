"""The comparison of optional packages: what it checks, and how it lists what is absent."""

import torch

from benchmarks import packages


def test_results_are_compared_with_the_first_and_the_absent_are_listed() -> None:
    arms = {
        "ours": lambda: [torch.ones(4), torch.full((2,), 2.0)],
        "theirs": lambda: [torch.ones(4), torch.full((2,), 2.5)],
        "absent": packages.left_out("no such package"),
    }
    found = packages.compare(iter(arms.items()), "cpu", 0.1)
    assert found == {
        "ours": {"difference": 0.0},
        "theirs": {"difference": 0.25},
        "absent": {"error": "no such package"},
    }
    lines = packages.table({"norm": found}).splitlines()
    assert lines[3] == "| norm | theirs | - | 2.5e-01 |"
    assert lines[4] == "| norm | absent | left out: no such package |  |"


def test_every_comparison_begins_with_what_runs_without_packages() -> None:
    for kind in (packages.dense_attention, packages.moba, packages.feed_forward):
        implementations = kind(32, "cpu")
        _, default = next(implementations)
        results = default()
        assert len(results) in (3, 4, 5)
        assert all(result.isfinite().all() for result in results)
        assert len(list(implementations)) >= 2
