"""The kernel that quantises columns, in Triton's interpreter."""

import torch

from benchmarks import grouped_fp8


def test_the_kernel_quantises_as_pytorch_does() -> None:
    """Numbers that FP8 has, as the interpreter rounds others wrongly."""
    x_nC = torch.randn(320, 128, generator=torch.Generator().manual_seed(0)).to(grouped_fp8.FP8).bfloat16()
    ends_E = torch.tensor([16, 160, 320], dtype=torch.int32)
    for expert, rows_mC in enumerate(x_nC.tensor_split(ends_E[:-1].long())):
        rows_mC[3] = 448  # the largest, so that scales are powers of two
        rows_mC *= 2**expert
    want_Cn, want_factors = grouped_fp8.quantize_columns(x_nC, ends_E)
    got_Cn = torch.empty_like(want_Cn)
    factors_EC = torch.empty(3, 128)
    grouped_fp8._columns[(3, 2)](x_nC, ends_E, got_Cn, factors_EC, *got_Cn.shape, 128, 64)
    assert factors_EC[:, 5].tolist() == [1, 2, 4]
    assert factors_EC.flatten().equal(want_factors)
    assert got_Cn.float().equal(want_Cn.float())
