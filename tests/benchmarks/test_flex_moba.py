"""MoBA by FlexAttention attends to what MoBA attends to, and its tiles are those that torch finds itself."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks import flex_tiles
from benchmarks.attention_peers import _flex
from benchmarks.attention_rows import Case, Row
from benchmarks.flex_moba import TILE, block_mask, sees_blocks, tiles
from moba_train.attention.kernels.common import reference


@pytest.mark.parametrize("text", ["1K:128/3,heads=4,kv=2,d=64", "2K:256/4,heads=4,kv=4,d=64,routing=local"])
def test_the_peer_gives_mobas_output(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gradients(function: Any, **_options: Any) -> Any:  # FlexAttention has none on a CPU
        return lambda *qkv, **options: function(*(x.detach().float() for x in qkv), **options)

    row = Row(Case.parse(text), "cpu", "reference")
    want = row.forward()[0].float()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", without_gradients)
        # As Triton's backend, which keeps lists with the selected blocks.
        patch.setattr(reference, "block_lists", lambda selected_HTC, *_: (selected_HTC, selected_HTC))
        calls = _flex(row)
    assert calls is not None
    out = calls[0]()
    assert (out[0].transpose(0, 1) - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("text", ["1K:64/3", "1000:128/3", "1K:128/3,documents=2x512"])
def test_rows_that_no_mask_of_tiles_can_have_are_left_out(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(f"{text},heads=4,kv=2,d=64")
    assert _flex(Row(case, "cpu", "reference")) is None
    monkeypatch.setattr(sys, "argv", ["flex_tiles", "--rows", case.name, "--output", "unused.json"])
    with pytest.raises(SystemExit, match="2"):
        flex_tiles.main()


@pytest.mark.parametrize("text", ["1K:128/3,heads=2,kv=2,d=64", "1K:256/2,heads=2,kv=1,d=64,routing=sink"])
def test_its_tiles_are_those_that_torch_finds_by_asking_for_every_pair(text: str) -> None:
    row = Row(Case.parse(text), "cpu", "reference")
    ours = block_mask(row.selected(), row.block_size)
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


def test_a_selection_beyond_32_bits_is_left_out() -> None:
    case = Case.parse("128K:128/8")
    row: Any = SimpleNamespace(case=case, tokens=case.tokens, block_size=case.block_size)
    assert _flex(row) is None


def test_a_row_takes_a_trained_models_inputs_and_refuses_others(tmp_path: Path) -> None:
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
    for other in (tmp_path / "missing", Path(__file__)):
        with pytest.raises(ValueError, match=r"inputs=.*allowed: a file of q, k and v"):
            Row(Case.parse(f"512:64/3,heads=4,kv=2,d=64,inputs={other}"), "cpu", "reference")
