"""The kernels of mechanisms compile for Hopper, without a GPU, with no more register spills than stated."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from moba_train.attention.kernels.common.tiles import TileShape
from moba_train.mechanisms.gates import msa_kernels as msa
from moba_train.mechanisms.gates import seer_kernel as seer
from moba_train.mechanisms.gates import short_block_kernels as short
from moba_train.mechanisms.infllm_v2 import score_kernels as infllm_v2
from moba_train.mechanisms.nsa import selection_kernel as nsa
from tests.attention.compiled_triton import SHARED_LIMIT, compile_for_hopper, fits, sizes, spilled_bytes


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16")])
def test_the_choice_by_compressed_blocks_fits_and_uses_the_matrix_units(
    head_dim: int, dtype: str, tmp_path: Path
) -> None:
    tile = nsa.tile(15)
    constants = {"OFFSETS": 5, "FORCED_FIRST": 1, "FORCED_LOCAL": 2, "C": 15, "SLOTS": 16}
    fits(nsa._choose, sizes(tile, head_dim, **constants), tile, dtype, 0, tmp_path)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_of_windows_fit_and_use_the_matrix_units(head_dim: int, tmp_path: Path) -> None:
    """For any group; block sizes are no part of these kernels. Memory is for the heads whose queries come together."""
    shape = infllm_v2.NORMALISER
    fits(infllm_v2._log_sum_exp, sizes(shape, head_dim), shape, "bf16", 0, tmp_path)
    together = {group: infllm_v2.together(group) for group in range(1, 129)}
    assert all(group % heads == 0 for group, heads in together.items())
    most = max(group for group, heads in together.items() if heads == max(together.values()))
    for group in (most, 64):
        constants = sizes(infllm_v2.SCORES, head_dim, group, TOGETHER=together[group])
        compiled = fits(infllm_v2._block_scores, constants, infllm_v2.SCORES, "bf16", 0, tmp_path)
        assert 2 * compiled.metadata.shared <= SHARED_LIMIT  # two programs on a multiprocessor


@pytest.mark.parametrize(
    ("head_dim", "block_size", "listed", "dtype"),
    [(64, 128, True, "fp16"), (128, 128, False, "bf16"), (128, 64, True, "bf16")],
)
def test_index_scores_probabilities_and_their_gradients_fit(
    head_dim: int, block_size: int, listed: bool, dtype: str, tmp_path: Path
) -> None:
    shape = msa.tile_shape(block_size)
    for attention in (True, False):
        constants = sizes(shape, head_dim, W=head_dim, LISTED=listed, OWN=listed, ATTENTION=attention)
        compiled = fits(msa._scores, constants, shape, dtype, 0, tmp_path, maxnreg=msa.REGISTERS)
        assert 2 * compiled.metadata.shared <= SHARED_LIMIT  # two programs on a multiprocessor
    shape = msa.KEY_GRADIENTS
    constants = {"W": head_dim, "LISTED": listed, "OWN": listed, "M": shape.rows, "N": shape.keys}
    fits(msa._key_gradients, constants, shape, dtype, 0, tmp_path)


@pytest.mark.parametrize(("head_dim", "listed", "dtype"), [(64, True, "fp16"), (128, False, "bf16")])
def test_probabilities_of_the_blocks_of_an_indexer_fit(head_dim: int, listed: bool, dtype: str, tmp_path: Path) -> None:
    shape = msa.tile_shape(16)
    constants = sizes(shape, head_dim, W=16, LISTED=listed, OWN=False, ATTENTION=True)
    fits(msa._scores, constants, shape, dtype, 0, tmp_path, maxnreg=msa.REGISTERS)


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"), [(64, 3, 16, "fp16"), (128, 16, 1, "bf16"), (128, 8, 48, "bf16")]
)
def test_attention_to_short_blocks_fits_and_uses_the_matrix_units(
    head_dim: int, group: int, block_size: int, dtype: str, tmp_path: Path
) -> None:
    by_query = short.query_tile(group)
    by_key = short.key_tile(block_size, head_dim)
    for kernel, shape, more in (
        (short._attend, by_query, {"B": block_size}),
        (short._query_gradients, by_query, {"B": block_size}),
        (short._key_gradients, by_key, {}),
    ):
        options = {"num_warps": shape.warps, "num_stages": shape.stages}
        compiled = compile_for_hopper(kernel, sizes(shape, head_dim, group, **more), shape.keys, dtype, **options)
        assert "mma.sync" in compiled.asm["ptx"] or "wgmma.mma_async" in compiled.asm["ptx"]
        assert 2 * compiled.metadata.shared <= SHARED_LIMIT  # two programs on a multiprocessor
        assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize(("head_dim", "block_size", "dtype"), [(64, 64, "fp16"), (128, 128, "bf16")])
def test_largest_probabilities_of_two_blocks_fit(head_dim: int, block_size: int, dtype: str, tmp_path: Path) -> None:
    shape = TileShape(seer.tile_rows(block_size), 0, 4, 3)
    constants = {"G": 4, "D": head_dim, "BLOCK": block_size, "M": shape.rows}
    fits(seer._maxima, constants, shape, dtype, 0, tmp_path)


def test_gradients_of_index_queries_compile_without_spills(tmp_path: Path) -> None:
    constants = {"W": 128, "M": msa.QUERY_GRADIENT_ROWS}
    assert spilled_bytes(compile_for_hopper(msa._query_gradients, constants), tmp_path) == 0
