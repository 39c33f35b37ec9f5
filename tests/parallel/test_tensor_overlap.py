"""Blocks have the transfers that torch's asynchronous tensor parallelism can hide, in the forms that it looks for.

What replaces them runs on GPUs only; the forms are found in the traced graphs here, without a second rank.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.attention.layout import packed_layout
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.model.build import build_attention
from moba_train.model.rope import rope_cos_sin
from moba_train.model.transformer import Transformer
from moba_train.parallel.tensor import apply_tensor_parallel, overlap_transfers
from tests.resolved import stages_of

ROWS = 64


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A group of two ranks of which only this one exists."""
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    torch.compiler.reset()  # what other tests compiled would be compiled for any length
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # monkeypatch would hide the option from all tests behind this one.
    with torch._inductor.config.patch({"_micro_pipeline_tp": False}):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()
    torch.compiler.reset()


def test_six_of_a_blocks_eight_transfers_can_be_hidden(mesh: DeviceMesh) -> None:
    from torch._inductor.fx_passes import micro_pipeline_tp as passes

    config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, layers=1, heads=4, kv_heads=2)
    model = Transformer(config)
    run = {"name": "a", "run_dir": "a", "data": {"train": [{"path": "a"}]}, "batch_tokens": ROWS}
    stages = [{"name": "a", "seq_len": ROWS, "tokens": ROWS}]
    recipe = RunConfig.model_validate(run | {"model": config, "stages": stages, "attention": {"default": "full"}})
    model.set_attention(build_attention(stages_of(recipe)[0].attention, config.head_width))
    (block,) = model.blocks
    apply_tensor_parallel(model, mesh)
    overlap_transfers(mesh)
    assert torch._inductor.config._micro_pipeline_tp
    found: list[tuple[list[int], list[bool]]] = []

    def look(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        gathers = passes.find_all_gather_patterns(module.graph)
        scatters = passes.find_reduce_scatter_patterns(module.graph)
        products = [len(passes._find_consumer_matmuls(gather.res_node)) for gather in gathers]
        found.append((products, [passes._find_producer_matmul(s.input_node) is not None for s in scatters]))
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        compiler = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition)
        return compiler(module, inputs)

    x_TD = torch.randn(ROWS // 2, config.hidden_size, requires_grad=True)
    layout = packed_layout([ROWS], torch.device("cpu"))
    cos, sin = rope_cos_sin(torch.arange(ROWS), config.rope, config.head_width)
    out_TD, _ = torch.compile(block.forward, backend=backend)(x_TD, cos, sin, layout)
    out_TD.sum().backward()
    forward, backward = found
    assert forward == ([3, 2], [True, True])  # queries, keys, values; gate and up; both outputs
    assert backward == ([1, 1], [False, False])  # the gradient of an input is a sum of products
