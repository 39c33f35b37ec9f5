"""Every shipped shape of the kernels compiles for Hopper, without a GPU, with no more register spills than stated."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moba_train.attention.moba.triton import backward, combine, forward, lists, packed, pool, select, tables  # noqa: E402
from moba_train.attention.moba.triton.tiles import Rows, Shape, shapes  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024
HALF = "q k v dout out dq dk dv partial_out partial_dq pooled packed_q packed_dout".split()  # noqa: SIM905
FLOATS = ("partial_lse", "lse", "stats", "packed_lse", "packed_delta", "sum_dk", "sum_dv")
INTEGERS = (
    *("entries", "list_of_tile", "last_tile", "begin", "end", "block_start", "block_end", "chosen", "own", "first"),
    *("counts", "cursors", "cu_seqlens", "first_of", "start"),
)
SCALARS = {"scale": "fp32", "scale_log2": "fp32"}


def compile_for_hopper(
    kernel: Any, constants: dict[str, Any], keys: int = 0, dtype: str = "bf16", **options: int
) -> Any:
    """The compiled kernel, with types as the launches give them: 16-byte aligned pointers, token strides too."""
    kinds = {**dict.fromkeys(HALF, f"*{dtype}"), **dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(INTEGERS, "*i32")}
    kinds["order"] = "*i64"
    kinds |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{dtype}[{keys}, {constants.get('D')}]>")
    kinds |= dict.fromkeys(("q_desc", "dout_desc"), f"tensordesc<{dtype}[{constants.get('M')}, {constants.get('D')}]>")
    kinds |= dict.fromkeys(("lse_desc", "delta_desc"), f"tensordesc<fp32[{constants.get('M')}]>")
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else kinds.get(name, SCALARS.get(name, "i32"))
        if signature[name].startswith("*") or name == "stride_t":
            attributes[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Stack per thread, which is where spilled registers go."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    report = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    match = re.search(r"STACK:(\d+)", report)
    assert match, report
    return int(match[1])


def sizes(shape: Shape, head_dim: int, **more: Any) -> dict[str, Any]:
    return {"G": 4, "D": head_dim, "M": shape.rows, "N": shape.keys, **more}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("block_size", "topk"), [(128, 8), (4096, 12)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_kernels_fit_and_use_the_matrix_units(head_dim, block_size, topk, dtype, tmp_path):
    shape = shapes(head_dim, block_size)
    history = {"C": topk - 1, "BLOCK": block_size}
    for kernel, tile, more, allowed in (
        (forward.attend_own, shape.own, {}, 32),
        (forward.attend_history, shape.forward, history, 32),
        (backward.dq_own, shape.dq, {}, 32),
        (backward.dq_history, shape.dq, history, 32),
        (backward.dkdv, shape.dkdv, {"C": topk - 1}, 128),
    ):
        constants = sizes(tile, head_dim, **more)
        compiled = compile_for_hopper(kernel, constants, tile.keys, dtype, num_warps=tile.warps, num_stages=tile.stages)
        name = f"{kernel.__name__} {tile}"
        assert "wgmma.mma_async" in compiled.asm["ptx"], name
        assert compiled.metadata.shared <= SHARED_LIMIT, name
        assert spilled_bytes(compiled, tmp_path) <= allowed, name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_rows_fit_and_use_the_matrix_units(head_dim, dtype, tmp_path):
    """Four products in the loop; bulk copies of the rows keep its registers from spilling."""
    shape = shapes(head_dim, 4096).dkdv
    assert shapes(head_dim, 4096).dkdv_rows is Rows.PACKED
    constants = {"D": head_dim, "M": shape.rows, "N": shape.keys}
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    compiled = compile_for_hopper(packed.dkdv_history, constants, shape.keys, dtype, **options)
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert spilled_bytes(compiled, tmp_path) <= 16  # around the loop, not in it
    loop = compiled.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
    assert loop.count("ttng.warp_group_dot ") == 4
    constants = sizes(shape, head_dim)
    compiled = compile_for_hopper(packed.dkdv_own, constants, shape.keys, dtype, **options)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert spilled_bytes(compiled, tmp_path) <= 96


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("choices", "rows", "warps"), [(7, 128, 8), (11, 128, 8), (63, 64, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_selection_fits(head_dim, choices, rows, warps, grouped, tmp_path):
    slots = triton.next_power_of_2(choices)
    constants = {"GROUP": grouped, "PREVIOUS": True, "FIRST": True, "G": 4, "C": choices, "SLOTS": slots}
    compiled = compile_for_hopper(select._select, {**constants, "D": head_dim, "M": rows, "N": 64}, num_warps=warps)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert spilled_bytes(compiled, tmp_path) <= (0 if choices < 16 else 128)


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (pool._pool, {"D": 128, "UNROLL": 16}),
        (lists._count, {"G": 4, "C": 7, "TILE": 128}),
        (lists._place, {"G": 4, "C": 7, "TILE": 128}),
        (tables._token_tables, {"SIZE": 256}),
        (tables._block_bounds, {"SIZE": 256}),
        (combine.combine_out, {"G": 4, "C": 7, "D": 128, "M": 32}),
        (combine.combine_dq, {"G": 4, "C": 7, "D": 128, "M": 32}),
        (backward.prepare, {"D": 128, "M": 32}),
        (packed.pack, {"G": 4, "C": 11, "D": 128, "M": 64}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_other_kernels_compile_without_spills(kernel, constants, tmp_path):
    assert spilled_bytes(compile_for_hopper(kernel, constants), tmp_path) == 0
