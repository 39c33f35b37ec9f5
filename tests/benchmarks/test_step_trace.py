"""What is read from a trace: groups of kernels, idle time and its causes, and how long ranks waited."""

import pytest

from benchmarks.step_trace import (
    COMMUNICATION,
    IDLE,
    Kernel,
    communication,
    gaps,
    group_of,
    idle_by_cause,
    kernels,
    longest,
    shares,
    waits,
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", COMMUNICATION),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", COMMUNICATION),
        ("Memcpy PtoP (Device -> Device)", COMMUNICATION),
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


def test_kernels_and_copies_by_start() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 15.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 2.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0.0, "dur": 5.0},
    ]
    found = kernels({"traceEvents": events})
    assert [kernel.name for kernel in found] == ["Memcpy HtoD", "gemm"]
    assert longest(found, ())[0] == {"kernel": "gemm", "group": "matrix products", "seconds": 15e-6, "calls": 1}


def test_a_gap_is_told_by_what_the_host_did_for_most_of_it() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 100.0},
        {"cat": "kernel", "name": "gemm", "ts": 110.0, "dur": 90.0},  # 10 us later: the latency of a launch
        {"cat": "kernel", "name": "gemm", "ts": 1200.0, "dur": 100.0},
        {"cat": "kernel", "name": "nccl_all_gather", "ts": 1250.0, "dur": 50.0},
        {"cat": "kernel", "name": "gemm", "ts": 1800.0, "dur": 200.0},
        {"cat": "kernel", "name": "gemm", "ts": 2100.0, "dur": 1.0},
        {"cat": "user_annotation", "name": "backward", "ts": 0.0, "dur": 1500.0},
        {"cat": "cpu_op", "name": "aten::empty", "ts": 210.0, "dur": 700.0},
        {"cat": "cuda_runtime", "name": "cudaMalloc", "ts": 250.0, "dur": 600.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1320.0, "dur": 10.0},
    ]
    found = gaps({"traceEvents": events})
    near = pytest.approx
    assert [tuple(gap) for gap in found] == [
        (near(200e-6), near(1000e-6), "cudaMalloc", "backward"),
        (near(1300e-6), near(500e-6), "", "backward"),
        (near(2000e-6), near(100e-6), "", "Python, between operators"),
    ]
    by_cause = idle_by_cause([*found, found[0]])
    assert list(by_cause) == ["cudaMalloc in backward", "backward", "Python, between operators"]
    assert by_cause["cudaMalloc in backward"] == pytest.approx(2000e-6)


def test_the_innermost_operator_tells_a_gap_that_several_cover() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 100.0},
        {"cat": "kernel", "name": "gemm", "ts": 200.0, "dur": 100.0},
        {"cat": "user_annotation", "name": "optimizer", "ts": 50.0, "dur": 400.0},
        {"cat": "cpu_op", "name": "aten::item", "ts": 60.0, "dur": 300.0},
    ]
    (gap,) = gaps({"traceEvents": events})
    assert gap.operator == "aten::item"


def test_ranks_wait_for_the_one_that_begins_last() -> None:
    def rank(base: int, *starts: float) -> list[Kernel]:
        events = [{"cat": "kernel", "name": "ncclDevKernel_AllGather(x)", "ts": start, "dur": 5.0} for start in starts]
        events.append({"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 1.0})
        return communication({"traceEvents": events, "baseTimeNanoseconds": base})

    ranks = [rank(7000, 0.0, 100.0), rank(2000, 35.0, 75.0)]  # 7 and 40, then 107 and 77 us
    first, second = waits([[*ranks[0], Kernel("ncclDevKernel_Send", 0.0, 1.0)], ranks[1]])
    assert first == {"ncclDevKernel_AllGather": pytest.approx(30e-6)}
    assert second == {"ncclDevKernel_AllGather": pytest.approx(30e-6)}
