"""The benchmark of grouped products in FP8, in miniature on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import grouped_fp8


def test_every_product_and_quantisation_is_timed_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["grouped_fp8", "--cpu", "--output", str(output)])
    grouped_fp8.main()
    found = json.loads(output.read_text())["results"]["1K"]
    layer = found.pop("layer, ms")
    cases = [case for projection in found.values() for case in projection.values()]
    assert len(cases) == 2 * (6 + 2 * 3), "quantisations; products in both precisions"
    assert sum(layer.values()) == pytest.approx(sum(case["ms"]["median"] for case in cases))
    assert all(0.01 < case["error"] < 0.05 for case in cases if "error" in case)


def test_a_wrong_product_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_fp8, "LARGEST", 0.02)  # ten steps of FP8's smallest numbers
    with pytest.raises(SystemExit, match=r"forward in FP8: .* allowed: 0\.05"):
        grouped_fp8.measure(1024, grouped_fp8.SMALL, 64, 32, "cpu")


def test_columns_of_an_expert_have_scales_of_their_own() -> None:
    x_nC = torch.ones(48, 64)
    x_nC[16:] = 3
    x_nC[:, 1] = 0
    ends_E = torch.tensor([16, 48], dtype=torch.int32)
    quantised_Cn, factors = grouped_fp8.quantize_columns(x_nC, ends_E)
    factors_EC = factors.view(2, 64)
    assert factors_EC[:, 0].tolist() == pytest.approx([1 / 448, 3 / 448])
    rows_per_expert = torch.tensor([16, 32])
    back_Cn = quantised_Cn.float() * factors_EC.repeat_interleave(rows_per_expert, 0).T
    torch.testing.assert_close(back_Cn, x_nC.T)
