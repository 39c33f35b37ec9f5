"""Every shipped shape of the kernels compiles for Hopper, without a GPU, with no more register spills than stated:
of the checks of .ci/run, kernels calls this, since all compilations take minutes.

MOBA_ARCHITECTURES="80 89 100 120" compiles for those compute capabilities as well, by default the largest shapes for
89, whose GPUs have the least shared memory.
"""

import os
import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moba_train.attention.kernels.common import lists, softmax, tiles  # noqa: E402
from moba_train.attention.kernels.common.tiles import TileShape, tile_shapes  # noqa: E402
from moba_train.attention.kernels.table import _GLUON_TRITON  # noqa: E402
from moba_train.attention.kernels.triton import (  # noqa: E402
    blocks_from_144_dkdv,
    blocks_from_144_dq,
    blocks_from_144_forward,
    blocks_to_128,
    composed_rows,
    highest_scores,
    spans,
)
from moba_train.attention.moba import gate_kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
KIBIBYTES = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may have, by compute capability; from CUDA's programming guide."""
SHARED_LIMIT = KIBIBYTES[90] * 1024
SPARE = 0 if triton.__version__.startswith(_GLUON_TRITON) else 160
"""Bytes of registers that kernels may spill in addition with other releases of Triton than that of the GPU tests."""
ARCHITECTURES = [int(name) for name in os.environ.get("MOBA_ARCHITECTURES", "89").split()]
HALF = "windows q k v dout out dq dk dv x gathered partial_out partial_dq pooled packed_q packed_dout".split()  # noqa: SIM905
HALF += ["q_index", "k_index"]
FLOATS = [
    *(
        "partial_lse",
        "lse",
        "delta",
        "diagonal_lse",
        "stats",
        "packed_lse",
        "packed_delta",
        "sums",
        "scores",
        "weights",
    ),
    *("sum_dk", "sum_dv", "diagonal_dk", "diagonal_dv", "part_dk", "part_dv", "logits", "mass", "dlogits", "maxima"),
]
INTEGERS = (
    *("chosen", "first_unit"),
    *(
        "slots",
        "entries",
        "list_of_tile",
        "last_tile",
        "list_of_split",
        "splits_of",
        "last_split",
        "first_split",
    ),
    *(
        "begin",
        "end",
        "bounds",
        "selected",
        "own",
        "diagonal",
        "block_of",
        "first",
        "marks",
        "counts",
        "cursors",
        "cu_seqlens",
        "first_of",
        "sink_first",
        "sink_end",
    ),
    *(
        "position_of",
        "row_of",
        "totals",
        "starts",
        "ends",
        "numbers",
        "best",
        "token_of",
        "edges",
        "seen_from",
        "seen_to",
    ),
    "ids",
)
TABLES = {"COUNTED": 2, "LISTS": 64, "FILL": 128}
SCALARS = {"scale": "fp32", "scale_log2": "fp32", "index_scale": "fp32"}


def compile_for_hopper(
    kernel: Any,
    constants: dict[str, Any],
    keys: int = 0,
    dtype: str = "bf16",
    target: GPUTarget = HOPPER,
    **options: int,
) -> Any:
    """The compiled kernel, with types as the launches give them: 16-byte aligned pointers, token strides too."""
    kinds = {**dict.fromkeys(HALF, f"*{dtype}"), **dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(INTEGERS, "*i32")}
    kinds |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{dtype}[{keys}, {constants.get('D')}]>")
    kinds |= dict.fromkeys(("q_desc", "dout_desc"), f"tensordesc<{dtype}[{constants.get('M')}, {constants.get('D')}]>")
    kinds |= dict.fromkeys(("lse_desc", "delta_desc"), f"tensordesc<fp32[{constants.get('M')}]>")
    kinds["pooled_desc"] = f"tensordesc<{dtype}[{constants.get('N')}, {constants.get('D')}]>"
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else kinds.get(name, SCALARS.get(name, "i32"))
        if signature[name].startswith("*") or name == "stride_t":
            attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    assert shared_in_place(compiled.asm["ttgir"]) <= BEHIND_BARRIERS, kernel.__name__
    return compiled


BEHIND_BARRIERS = {"cursors", "sum_dk"}
"""Read and written by several threads, with barriers between."""


def shared_in_place(ttgir: str) -> set[str]:
    """The arguments of which an element may be read by one thread and written by another.

    Nothing keeps the warps of a program in step: a late one would read what another has written already.
    """
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*?)\}>", ttgir))

    def one_thread_each(kind: str) -> bool:
        """Whether a tensor of this type has every element in one thread only."""
        match = re.fullmatch(r"tensor<([\dx]+)x!.*>, (#\w+)>", kind)
        if not match or match[2] not in layouts:
            return False
        lists = [[int(x) for x in found.split(", ")] for found in re.findall(r"\[([\d, ]+)\]", layouts[match[2]])]
        covered = [per_thread * threads * warps for per_thread, threads, warps in zip(*lists[:3], strict=True)]
        return all(size >= many for size, many in zip(map(int, match[1].split("x")), covered, strict=True))

    read: dict[str, Any] = {}
    written: dict[str, Any] = {}
    origin: dict[str, Any] = {}
    for line in ttgir.replace(" loc(", " ").splitlines():  # regions side by side may use one name for two values
        for name, source in re.findall(r"(%\w+) = (?:(?:tt\.\w+|ttg\.convert_layout) )?(%\w+)", line):
            origin[name] = origin.get(source, source.removeprefix("%"))
        for found, how in ((read, "load"), (written, "store")):
            for pointer, kind in re.findall(rf"tt\.{how} (%\w+).*? : (\S+<.*?>(?:, #\S+>)?) ", line + " "):
                found.setdefault(origin.get(pointer, pointer.removeprefix("%")), set()).add(kind)
    both = read.keys() & written.keys()
    return {name for name in both if len(read[name] | written[name]) > 1 or not all(map(one_thread_each, read[name]))}


def test_what_threads_share_is_found() -> None:
    compiled = compile_for_hopper(lists._scatter, {"G": 4, "HISTORY": 7, "TILE": 64})
    assert shared_in_place(compiled.asm["ttgir"]) == {"cursors"}


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Stack per thread, which is where spilled registers go."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    report = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    match = re.search(r"STACK:(\d+)", report)
    assert match, report
    return int(match[1])


def spills_in_the_loop(compiled: Any, folder: Path) -> int:
    """Loads and stores of spilled registers in the innermost loop with matrix products."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", cubin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)]
    loops = []
    for at, what in code:
        target = re.search(r"BRA.*?0x([0-9a-f]+)", what)
        if target and int(target[1], 16) < at:
            loops.append([x for place, x in code if int(target[1], 16) <= place <= at])
    body = min((loop for loop in loops if any("HGMMA" in x for x in loop)), key=len)
    return sum("LDL" in x or "STL" in x for x in body)


def sizes(shape: TileShape, head_dim: int, group: int = 16, **more: Any) -> dict[str, Any]:
    """Compile-time sizes; a loop over the query heads of a group must not reserve memory for each of them."""
    return {"G": group, "D": head_dim, "M": shape.rows, "N": shape.keys, **more}


def fits(
    kernel: Any,
    constants: dict[str, Any],
    shape: TileShape,
    dtype: str,
    allowed: int,
    folder: Path,
    **options: int,
) -> Any:
    """Compile; the matrix units are used, shared memory suffices, and no more than `allowed` bytes are spilled."""
    name = f"{kernel.__name__} {shape} {constants}"
    options |= {"num_warps": shape.warps, "num_stages": shape.stages}
    compiled = compile_for_hopper(kernel, constants, shape.keys, dtype, **options)
    assert "wgmma.mma_async" in compiled.asm["ptx"], name
    assert compiled.metadata.shared <= SHARED_LIMIT, name
    assert spilled_bytes(compiled, folder) <= allowed + SPARE, name
    return compiled


@pytest.mark.parametrize(
    ("head_dim", "partial", "dtype"), [*product([64, 128], [False, True], ["bf16"]), (128, False, "fp16")]
)
def test_kernels_of_long_blocks_fit_and_use_the_matrix_units(
    head_dim: int, partial: bool, dtype: str, tmp_path: Path
) -> None:
    """Float16 takes the registers that bfloat16 takes. partial: some keys are another rank's."""
    shape = tile_shapes(head_dim, 4096)
    call = {"PARTIAL": partial}
    history = {**call, "HISTORY": 11, "BLOCK": 4096}
    for kernel, tile, more, allowed in (
        (blocks_from_144_forward.forward_diagonal, shape.diagonal, call, 32),
        (blocks_from_144_forward.forward_history, shape.forward, history, 64),
        (blocks_from_144_dq.dq_diagonal, shape.dq, {}, 32),
        (blocks_from_144_dq.dq_history, shape.dq, history, 32),
        (blocks_from_144_dkdv.dkdv_diagonal, shape.dkdv_diagonal, {}, 96),
    ):
        fits(kernel, sizes(tile, head_dim, **more), tile, dtype, allowed, tmp_path)
    constants = {"D": head_dim, "M": shape.dkdv.rows, "N": shape.dkdv.keys}
    compiled = fits(blocks_from_144_dkdv.dkdv_history, constants, shape.dkdv, dtype, 1536, tmp_path)
    assert spills_in_the_loop(compiled, tmp_path) == 0  # all of them are behind it, once for a span
    loop = compiled.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
    assert loop.count("ttng.warp_group_dot ") == 4


@pytest.mark.parametrize(
    ("head_dim", "partial", "dtype", "block_size"),
    [*product([64, 128], [False, True], ["bf16"], [64, 128]), (128, False, "fp16", 128)],
)
def test_kernels_of_short_blocks_fit_and_use_the_matrix_units(
    head_dim: int, partial: bool, dtype: str, block_size: int, tmp_path: Path
) -> None:
    shape = tile_shapes(head_dim, block_size)
    assert shape.short_forward is not None
    assert shape.short_backward is not None
    # False: with spans in their place, and gradients in ranges of queries.
    for own in (True, False) if (dtype, partial, block_size) == ("bf16", False, 64) else (True,):
        call = {"PARTIAL": partial, "HISTORY": 7, "BLOCK": block_size, "SPLIT": 4096, "DIAGONAL": own}
        constants = sizes(shape.short_forward, head_dim, **call)
        fits(blocks_to_128.forward_to_128, constants, shape.short_forward, dtype, 128, tmp_path)
        constants = sizes(shape.short_backward, head_dim, **call, SUM=not own)
        fits(blocks_to_128.backward_to_128, constants, shape.short_backward, dtype, 512, tmp_path)


def kernels_at(head_dim: int, block_size: int, limit: int) -> list[tuple[Any, TileShape, dict[str, Any]]]:
    """Kernels of blocks of this size, their tiles on a GPU with `limit` bytes of shared memory, and their constants."""
    shape, span = tile_shapes(head_dim, block_size, limit), spans.span_shapes(head_dim, limit)
    call = {"PARTIAL": False, "HISTORY": 7, "BLOCK": block_size}
    found: list[tuple[Any, TileShape | None, dict[str, Any]]]
    if block_size > 128:
        found = [
            (blocks_from_144_forward.forward_diagonal, shape.diagonal, {"PARTIAL": False}),
            (blocks_from_144_forward.forward_history, shape.forward, call),
            (blocks_from_144_dq.dq_diagonal, shape.dq, {}),
            (blocks_from_144_dq.dq_history, shape.dq, call),
            (blocks_from_144_dkdv.dkdv_diagonal, shape.dkdv_diagonal, {}),
            (blocks_from_144_dkdv.dkdv_history, shape.dkdv, {}),
        ]
    else:
        call |= {"SPLIT": 4096, "DIAGONAL": True}
        kept = {"GROUP": False, "PREVIOUS": True, "FIRST": True, "LOCAL": 0, "HISTORY": 7, "KEPT": 8, "LEVELS": 3}
        found = [
            (gate_kernels._select, TileShape(64, 64, gate_kernels.warps(7), 3), kept),
            (blocks_to_128.forward_to_128, shape.short_forward, call),
            (blocks_to_128.backward_to_128, shape.short_backward, {**call, "SUM": False}),
            (spans.forward_spans, span.forward, {"SINKS": True}),
            (spans.dq_spans, span.dq, {"SINKS": True}),
            (spans.dkdv_spans, span.dkdv, {}),
        ]
    kernels = []
    for kernel, tile, more in found:
        assert tile is not None
        constants = sizes(tile, head_dim, **more)
        kernels.append((kernel, tile, {name: value for name, value in constants.items() if name in kernel.arg_names}))
    return kernels


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [128, 4096])
@pytest.mark.parametrize("head_dim", [64, 128] if "MOBA_ARCHITECTURES" in os.environ else [128])
def test_kernels_fit_the_shared_memory_of_other_gpus(head_dim: int, block_size: int, architecture: int) -> None:
    limit = KIBIBYTES[architecture] * 1024
    target = GPUTarget("cuda", architecture, 32)
    for kernel, tile, constants in kernels_at(head_dim, block_size, limit):
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "target": target}
        compiled = compile_for_hopper(kernel, constants, tile.keys, **options)
        assert compiled.metadata.shared <= limit, kernel.__name__


def test_kernels_over_lists_fit_with_127_selected_blocks_of_a_query(tmp_path: Path) -> None:
    """Whatever kernels reserve must not grow with the number of selected blocks."""
    long, short = tile_shapes(128, 4096), tile_shapes(128, 128)
    sizes_of = {"PARTIAL": True, "HISTORY": 127}
    assert short.short_forward is not None
    assert short.short_backward is not None
    for kernel, tile, more, allowed in (
        (blocks_from_144_forward.forward_history, long.forward, {"BLOCK": 4096}, 64),
        (blocks_from_144_dq.dq_history, long.dq, {"BLOCK": 4096}, 32),
        (blocks_to_128.forward_to_128, short.short_forward, {"BLOCK": 128, "SPLIT": 4096, "DIAGONAL": True}, 128),
        (
            blocks_to_128.backward_to_128,
            short.short_backward,
            {"BLOCK": 128, "SPLIT": 4096, "DIAGONAL": True, "SUM": True},
            512,
        ),
    ):
        fits(kernel, sizes(tile, 128, **sizes_of, **more), tile, "bf16", allowed, tmp_path)


@pytest.mark.parametrize(("count", "levels"), [(2, 1), (7, 3), (11, 4), (64, 0), (127, 0)])
@pytest.mark.parametrize(("head_dim", "grouped"), [(64, False), (128, True)])
def test_selection_fits(head_dim: int, count: int, levels: int, grouped: bool, tmp_path: Path) -> None:
    slots = triton.next_power_of_2(count)
    constants = {"GROUP": grouped, "PREVIOUS": True, "FIRST": True, "LOCAL": 0, "G": 4, "HISTORY": count, "KEPT": slots}
    constants |= {"D": head_dim, "M": 64, "N": 64}
    for kernel, more in (
        (gate_kernels._select, {"LEVELS": levels}),
        (gate_kernels._select_marked, {"ALL": count > 16}),
    ):
        if levels or kernel is gate_kernels._select_marked:
            allowed = 16 if count < 16 else 128
            fits(
                kernel,
                {**constants, **more},
                TileShape(64, 64, gate_kernels.warps(count), 3),
                "bf16",
                allowed,
                tmp_path,
            )


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (gate_kernels._pool, {"D": 128, "UNROLL": 16}),
        (lists._count, {"G": 4, "HISTORY": 7, "TILE": 64}),
        (lists._sum_chunks, {"CHUNKS": 32, "BLOCKS": 32}),
        (lists._find_starts, {"CHUNKS": 32, "BLOCKS": 32}),
        (lists._scatter, {"G": 4, "HISTORY": 7, "TILE": 64}),
        (tiles._tile_tables, {**TABLES, "RANKED": True, "AT_LEAST": 0, "ROWS": 64}),
        (
            tiles._tile_tables,
            {"RANKED": False, "COUNTED": 1, "AT_LEAST": 1, "ROWS": 4096, "LISTS": 64, "FILL": 128},
        ),
        (lists._token_tables, {"SIZE": 256}),
        (lists._block_bounds, {"SIZE": 256}),
        (softmax.combine_out, {"PARTIAL": True, "INDIRECT": False, "G": 4, "HISTORY": 7, "D": 128, "M": 32}),
        (softmax.combine_out, {"PARTIAL": True, "INDIRECT": False, "G": 4, "HISTORY": 1, "D": 16, "M": 32}),
        (softmax.combine_dq, {"PARTIAL": True, "INDIRECT": False, "G": 4, "HISTORY": 1, "D": 16, "M": 32}),
        (softmax.combine_dq, {"PARTIAL": True, "INDIRECT": False, "G": 4, "HISTORY": 7, "D": 128, "M": 32}),
        (softmax.combine_out, {"PARTIAL": False, "INDIRECT": True, "G": 4, "HISTORY": 11, "D": 128, "M": 32}),
        (softmax.combine_dq, {"PARTIAL": False, "INDIRECT": True, "G": 4, "HISTORY": 11, "D": 128, "M": 32}),
        (composed_rows._find_rows, {"G": 4, "HISTORY": 11, "M": 64}),
        (composed_rows._gather, {"D": 128, "M": 64}),
        (softmax.sum_splits, {"ADD": True, "D": 128, "N": 128, "KEYS": 16}),
        (softmax.sum_splits, {"ADD": False, "D": 128, "N": 128, "KEYS": 16}),
        (softmax.prepare, {"D": 128, "M": 32}),
        (blocks_from_144_dkdv.pack, {"STORE_POSITIONS": False, "G": 4, "HISTORY": 11, "D": 128, "M": 64}),
        (lists._scatter, {"G": 4, "HISTORY": 127, "TILE": 64}),
        (softmax.combine_out, {"PARTIAL": True, "INDIRECT": False, "G": 4, "HISTORY": 127, "D": 128, "M": 32}),
        (softmax.combine_dq, {"PARTIAL": False, "INDIRECT": True, "G": 4, "HISTORY": 127, "D": 128, "M": 32}),
        (composed_rows._find_rows, {"G": 4, "HISTORY": 127, "M": 64}),
        (blocks_from_144_dkdv.pack, {"STORE_POSITIONS": True, "G": 4, "HISTORY": 127, "D": 128, "M": 64}),
        (highest_scores._choose, {"KEPT": 64, "M": 8, "N": 512, "num_warps": 4}),
        (highest_scores._choose, {"KEPT": 64, "M": 1, "N": 16384, "num_warps": 16}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_other_kernels_compile_without_spills(kernel: Any, constants: dict[str, Any], tmp_path: Path) -> None:
    options = {name: constants[name] for name in constants if name == "num_warps"}
    sizes = {name: constants[name] for name in constants if name not in options}
    assert spilled_bytes(compile_for_hopper(kernel, sizes, **options), tmp_path) <= SPARE


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_of_spans_fit_and_use_the_matrix_units(head_dim: int, tmp_path: Path) -> None:
    shapes = spans.span_shapes(head_dim)
    for kernel, shape in (
        (spans.forward_spans, shapes.forward),
        (spans.dq_spans, shapes.dq),
        (spans.dkdv_spans, shapes.dkdv),
    ):
        for sinks in [{"SINKS": False}, {"SINKS": True}] if kernel is not spans.dkdv_spans else [{}]:
            fits(kernel, sizes(shape, head_dim, **sinks), shape, "bf16", 0, tmp_path)
