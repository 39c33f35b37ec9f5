"""MoBA by FlexAttention attends to what MoBA attends to, and its tiles are those that torch finds itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.attention_rows import Case, Row
from benchmarks.flex_moba import TILE, block_mask, sees_blocks, tiles


def selected(row: Row) -> torch.Tensor:
    found: torch.Tensor = row.forward()[3][0]
    return found


@pytest.mark.parametrize("text", ["1K:128/3,heads=4,kv=2,d=64", "2K:256/4,heads=4,kv=4,d=64,routing=local"])
def test_the_mask_gives_mobas_output(text: str) -> None:
    row = Row(Case.parse(text), "cpu", "reference")
    mask = block_mask(selected(row), row.block_size)
    # Without gradients: FlexAttention has none on a CPU.
    q, k, v = (x.float().transpose(0, 1)[None] for x in (row.q, row.k, row.v))
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    want = row.forward()[0].float()
    assert (out[0].transpose(0, 1) - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("text", ["1K:128/3,heads=2,kv=2,d=64", "1K:256/2,heads=2,kv=1,d=64,routing=sink"])
def test_its_tiles_are_those_that_torch_finds_by_asking_for_every_pair(text: str) -> None:
    row = Row(Case.parse(text), "cpu", "reference")
    ours = block_mask(selected(row), row.block_size)
    torchs = create_block_mask(ours.mask_mod, 1, row.case.heads, row.tokens, row.tokens, device="cpu", BLOCK_SIZE=TILE)
    for kind in ("kv", "full_kv"):
        counts, indices = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert counts.equal(getattr(torchs, f"{kind}_num_blocks"))
        for head, tile in ((0, 0), (1, 5), (1, 7)):
            listed = indices[0, head, tile, : counts[0, head, tile]].sort().values
            wanted = getattr(torchs, f"{kind}_indices")[0, head, tile, : counts[0, head, tile]].sort().values
            assert listed.equal(wanted)


def test_queries_that_agree_need_their_own_pairs_and_others_nearly_everything() -> None:
    tokens, block, heads = 4096, 128, 1
    agreeing_HTC = torch.zeros(heads, tokens, 1, dtype=torch.int64)
    agreeing_HTC[:, :block] = -1
    pairs = tiles(sees_blocks(agreeing_HTC, block), block).pairs_computed()
    assert pairs == (1 + 2 * 31) * TILE**2, "the first block and the own one"
    own_T = torch.arange(tokens) // block
    spread_HTC = (torch.arange(tokens) % own_T.clamp(min=1)).where(own_T > 0, -1)[None, :, None]
    found = tiles(sees_blocks(spread_HTC, block), block).pairs_computed()
    assert found == 32 * 33 // 2 * TILE**2, "128 queries in turn select every block: all of causal attention"


def test_a_row_takes_a_trained_models_inputs_and_refuses_other_shapes(tmp_path: Path) -> None:
    file = tmp_path / "layer.safetensors"
    inputs = {name: torch.randn(600, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    save_file(inputs, file)
    row = Row(Case.parse(f"512:64/3,heads=4,kv=2,d=64,inputs={file}"), "cpu", "reference")
    assert row.q.equal(inputs["q"][:512].bfloat16())
    assert row.v.equal(inputs["v"][:512].bfloat16())
    assert not row.case.is_plain
    for sizes, shape in (("512:64/3,heads=8,kv=2,d=64", r"\[512, 4, 64\]"), ("1K:64/3,heads=4,kv=2,d=64", r"\[600")):
        with pytest.raises(ValueError, match=f"q has shape {shape}"):
            Row(Case.parse(f"{sizes},inputs={file}"), "cpu", "reference")
