"""Every moment of a profiled step counts once, and kernels fall into the groups that their names tell."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import training_profile
from benchmarks.training_profile import COMMUNICATION, IDLE, Kernel, group_of, kernels, shares
from benchmarks.training_rows import Row, parse_row


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", COMMUNICATION),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("dkdv_history", "attention"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdam...>",
            "optimizer and gradient norm",
        ),
        ("void (anonymous namespace)::cunn_SoftMaxForward<4, float, float>", "loss"),
        ("triton_red_fused__to_copy_add_mul_pow_rsqrt_0", "norms, rotary, elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "norms, rotary, elementwise"),
    ],
)
def test_groups(name: str, group: str) -> None:
    assert group_of(name, {"dkdv_history"}) == group


def test_communication_counts_where_nothing_computes_and_the_rest_is_idle() -> None:
    found = [
        Kernel("nccl_a", 0, 10e6),  # 2 s before anything computes
        Kernel("gemm", 2e6, 5e6),
        Kernel("flash", 4e6, 6e6),  # 1 s beside the product
        Kernel("nccl_b", 5e6, 12e6),  # beside attention, then beside the other transfer
        Kernel("gemm", 13e6, 14e6),
        Kernel("nccl_c", 13.5e6, 16e6),
    ]
    assert shares(found) == {COMMUNICATION: 10.0, "matrix products": 4.0, "attention": 1.0, IDLE: 1.0}


def test_the_report_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 15.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 2.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0.0, "dur": 5.0},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert [kernel.name for kernel in kernels({"traceEvents": events})] == ["Memcpy HtoD", "gemm"]
    arguments = argparse.Namespace(row="8K:full:steps2", output=tmp_path / "result.json")
    training_profile.report(tmp_path / "trace.json", parse_row(arguments.row, Row()), arguments)
    results = json.loads(arguments.output.read_text())["results"]
    assert results["groups_s"] == pytest.approx({"matrix products": 7.5e-6, "copies": 2.5e-6, IDLE: 0.0}, abs=1e-12)
    assert results["longest"][0] == {"kernel": "gemm", "group": "matrix products", "seconds": 15e-6, "calls": 1}
    assert "| matrix products | 0.0 | 75.0% |" in capsys.readouterr().out
