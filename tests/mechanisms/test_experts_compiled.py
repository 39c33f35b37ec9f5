"""Experts in compiled blocks: each block is one graph, on one rank and on several, and it moves all rows as often as it
must."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload

from moba_train.parallel.activations import Kept
from tests.run import test_pipeline_gradients
from tests.run.trainer_ranks import Ranks

ACTIVE = 3
HIDDEN = 24
ROWS = test_pipeline_gradients.SEQ_LEN * ACTIVE
"""Choices of a micro-batch on a rank; numbers of rows that arrive are symbols."""
MIXTURE = {"experts": 8, "active": ACTIVE, "intermediate_size": 16}
FORWARD = {
    1: ["index_select", "_grouped_mm"],
    2: ["index_select", "start_exchange", "finish_exchange", "_grouped_mm", "exchange_rows"],
}
"""Operators that make a tensor with a row of the model's width for each choice of a token: rows are copied for their
experts, computed by them, and added up for their tokens, of which each has one row."""
BACKWARD = {
    1: ["index_select", "index_select", "_grouped_mm", "_grouped_mm", "add"],
    2: [
        *("index_select", "index_select", "start_exchange", "exchange_rows", "finish_exchange"),
        *("_grouped_mm", "_grouped_mm", "add", "exchange_rows"),
    ],
}
"""Those of a recomputed block: its rows and their gradients are copied; gradients by the gate and up projections are
added. No results of experts are computed or fetched again."""


def _wide(graph: fx.GraphModule) -> list[str]:
    """Names of the operators that make such tensors, as they come. All are in bf16."""
    found = []
    for node in graph.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else (values,):
            if isinstance(node.target, OpOverload) and isinstance(value, Tensor) and value.ndim == 2:
                rows, columns = value.shape
                is_wide = isinstance(columns, int) and columns == HIDDEN and (not isinstance(rows, int) or rows == ROWS)
                assert not is_wide or value.dtype == torch.bfloat16, node
                found += [node.target.overloadpacket.__name__] * is_wide
    return [name for name in found if name != "detach"]


def worker(ep: int, output: str) -> None:
    """Training steps of compiled and recomputed blocks."""
    counters.clear()
    passes: dict[str, list[list[str]]] = {"forward": [], "backward": []}

    def noting(name: str) -> Any:
        def compiler(graph: fx.GraphModule, _inputs: Any) -> Any:
            passes[name].append(_wide(graph))
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=noting("forward"),
        bw_compiler=noting("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    model = {
        "attention": {"default": "full"},
        "precision": {"compute": "bf16"},
        "kept": (Kept.INPUT,) * 4,
        "further": {"moe": MIXTURE},
        "compiled": True,
    }
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        test_pipeline_gradients.worker([(model, {"ep": ep})], output)
    assert not counters["graph_break"]
    for name, want in (("forward", FORWARD[ep]), ("backward", BACKWARD[ep])):
        assert passes[name]
        assert all(found == want for found in passes[name]), passes


@pytest.mark.parametrize("ep", [1, 2])
def test_a_recomputed_block_is_one_graph_with_few_passes_over_all_rows(ep: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks.work(worker, (ep, str(tmp_path / "results.pt")), ep)
