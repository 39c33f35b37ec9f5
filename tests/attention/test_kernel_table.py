"""The table of kernels from plain facts: no GPU, no tensor."""

import doctest
import re
import runpy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.attention.kernels import table
from moba_train.attention.kernels.table import Facts, Machine, kernel_for, resolve_backend
from moba_train.attention.kernels.varlen import KERNELS
from tests.forked_program import ForkedProgram

ROOT = Path(__file__).parents[2]
KEY = "attention.moba.backend"
FLASH_2 = frozenset({"torch's FlashAttention-2"})
HOPPER = Machine("cuda", (9, 0), "3.6.0", packages=FLASH_2)
WITH_FLASH_4 = replace(HOPPER, packages=FLASH_2 | {"flash-attn-4"})
CPU = Machine("cpu")


def facts(machine: Machine = HOPPER, **changes: Any) -> Facts:
    usual: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "head_width": 128,
        "block_size": 512,
        "history_blocks": 2,
        "rows": 2**20,
    }
    return Facts(machine, **usual | changes)


@pytest.fixture(autouse=True)
def warned_of_nothing_yet() -> Iterator[None]:
    table._warn_of_slower.cache_clear()
    yield
    table._warn_of_slower.cache_clear()


@pytest.mark.parametrize(
    ("given", "order", "why"),
    [
        (facts(), "triton reference", "which can do head dim 128 and block_size 512"),
        (facts(CPU), "reference", "on cpu"),
        (facts(head_width=96), "composed reference", "torch's FlashAttention-2; not triton: head dim 96, 64 or 128"),
        (facts(block_size=100), "composed reference", "not triton: block_size 100, a multiple of 16 from 64 to 16384"),
        (facts(history_blocks=128), "composed reference", "128 history blocks of a query, at most 127"),
        (
            facts(dtype=torch.float32),
            "reference",
            "dtype torch.float32, bfloat16 or float16 needed; flash-attn-4: dtype",
        ),
        (facts(replace(HOPPER, triton=None)), "composed reference", "not triton: the package triton is not installed"),
        (facts(Machine("cuda", (7, 5), None)), "reference", "compute capability (7, 5), 8.0 or newer needed"),
        # Its programs have 64 KiB of shared memory, and Triton does not support it.
        (facts(Machine("cuda", (7, 5), "3.6.0")), "reference", "compute capability (7, 5), 8.0 or newer needed"),
        # Measured: with flash-attn-4, long blocks and many rows; fewer rows suffice in a shard that meets all keys.
        (facts(WITH_FLASH_4, block_size=2048, rows=2**21), "composed triton reference", "faster for blocks of 2048"),
        (facts(block_size=2048, rows=2**21), "triton reference", ""),
        (facts(WITH_FLASH_4, block_size=1024, rows=2**21), "triton reference", ""),
        (facts(WITH_FLASH_4, block_size=2048, rows=2**21 - 1), "triton reference", ""),
        (facts(WITH_FLASH_4, block_size=2048, rows=2**19, whole=False), "composed triton reference", "flash-attn-4"),
        (facts(WITH_FLASH_4, block_size=2048, rows=2**19 - 1, whole=False), "triton reference", ""),
        (facts(WITH_FLASH_4, block_size=2048, rows=2**19, whole=False, all_keys=False), "triton reference", ""),
        (facts(WITH_FLASH_4, head_width=192, block_size=2048, rows=2**21), "composed reference", "FlashAttention-2"),
    ],
)
def test_auto_takes_the_best_backend_of_a_stage_and_says_why(given: Facts, order: str, why: str) -> None:
    choice = resolve_backend(KEY, "auto", given)
    assert " ".join(choice.order) == order
    assert why in choice.why


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        (
            "triton",
            facts(head_width=96),
            "given 'triton', which cannot run: head dim 96, 64 or 128 needed; allowed: auto,",
        ),
        ("triton", facts(CPU), "cannot run: tensors are on cpu, not on CUDA; allowed: auto, composed, reference"),
        (
            "composed",
            facts(dtype=torch.float32),
            "'composed', which cannot run: flash-attn-4: dtype .*; allowed: auto, ref",
        ),
        ("cuda", facts(), "given 'cuda'; allowed: auto, triton, composed, reference"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_key_reason_and_what_is_allowed(
    wanted: str, given: Facts, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^attention\.moba\.backend: .*{message}"):
        resolve_backend(KEY, wanted, given)


def test_a_backend_by_name_has_no_other_behind_it_but_the_reference_behind_the_composition() -> None:
    assert resolve_backend(KEY, "triton", facts()).order == ("triton",)
    assert resolve_backend(KEY, "composed", facts()).order == ("composed", "reference")
    assert resolve_backend(KEY, "composed", facts(CPU, dtype=torch.float64)).order == ("composed", "reference")
    assert resolve_backend(KEY, "reference", facts()).order == ("reference",)


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        (facts(), "hopper/blocks_from_512_forward", "hopper/blocks_256_to_4096_gradients"),
        (facts(block_size=128), "triton/blocks_to_128", "hopper/blocks_128_gradients"),
        (facts(block_size=256), "triton/blocks_from_144_forward", "hopper/blocks_256_to_4096_gradients"),
        (facts(block_size=640), "hopper/blocks_from_512_forward", "triton/blocks_from_144_dq"),
        (facts(block_size=528), "triton/blocks_from_144_forward", "triton/blocks_from_144_dq"),
        (facts(history_blocks=0), "hopper/blocks_from_512_forward", "triton/blocks_from_144_dq"),
        (facts(block_size=128, history_blocks=0), "triton/blocks_to_128", "triton/blocks_to_128"),
        (facts(all_keys=False), "triton/blocks_from_144_forward", "triton/blocks_from_144_dq"),
        (facts(head_width=64), "triton/blocks_from_144_forward", "triton/blocks_from_144_dq"),
        (facts(block_size=64), "triton/blocks_to_128", "triton/blocks_to_128"),
    ],
)
def test_passes_by_block_size_width_gpu_and_keys(given: Facts, forward: str, backward: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said where the release costs nothing
        assert (kernel_for("forward", given).file, kernel_for("backward", given).file) == (
            f"{forward}.py",
            f"{backward}.py",
        )


@pytest.mark.parametrize(
    ("machine", "parts"),
    [
        (replace(HOPPER, triton="3.7.1"), ("Triton 3.7.1 is", "need 3.6", "install a release of torch")),
        *(
            (replace(HOPPER, capability=(n, 0)), (f"({n}, 0), the fastest kernels are for (9, 0)",))
            for n in (8, 10, 12)
        ),
    ],
)
def test_what_costs_the_fastest_kernels_is_named_once_with_what_is_lost(
    machine: Machine, parts: tuple[str, ...]
) -> None:
    """Another release of Triton on Hopper, or another GPU."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for block_size in (512, 128, 4096, 512):
            for does in ("forward", "backward"):
                assert kernel_for(does, facts(machine, block_size=block_size)).file.startswith("triton/")
    (warning,) = found
    for part in (*parts, "slower", "the backward pass with blocks of 256, 512, 1024, 2048, 4096"):
        assert part in str(warning.message), part


def test_the_fastest_kernels_can_be_tried_with_another_release_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = facts(replace(HOPPER, triton="3.7.0"))
    with pytest.warns(UserWarning, match=r"Triton 3\.7\.0 is installed, but the fastest kernels"):
        assert kernel_for("forward", newer).file == "triton/blocks_from_144_forward.py"
    monkeypatch.setenv("MOBA_GLUON_TRITON", "3.7")
    again: dict[str, Any] = runpy.run_path(str(table.__file__))
    assert again["kernel_for"]("forward", newer).file == "hopper/blocks_from_512_forward.py"
    assert again["kernel_for"]("backward", newer).file == "hopper/blocks_256_to_4096_gradients.py"


def test_no_pass_is_an_error_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"no kernel for the forward pass: .*blocks_to_128\.py: block_size 40"):
        kernel_for("forward", facts(block_size=40))


def test_the_rows_name_modules_that_have_what_the_backend_calls() -> None:
    pytest.importorskip("triton")
    for row in table.KERNELS:
        path = "moba_train/attention/" + (row.file if row.does == "select" else f"kernels/{row.file}")
        assert (ROOT / path).exists(), path
        if not row.gluon or table.triton_release().startswith("3.6."):
            module = import_module(path.removesuffix(".py").replace("/", "."))
            wanted = {"select": "select_blocks", "forward": "attend", "backward": "attend_backward", "decode": "decode"}
            assert callable(getattr(module, wanted[row.does]))
    assert [row.name for row in table.VARLEN] == [kernel.name for kernel in KERNELS]


def test_no_other_file_of_attention_asks_for_a_capability_or_a_release() -> None:
    asks = re.compile(
        r"get_device_capability|triton\.__version__|find_spec\(\"triton|TRITON_INTERPRET\"|is_flash_attention_av"
    )
    found = {
        str(path.relative_to(ROOT / "moba_train"))
        for folder in ("attention", "mechanisms")
        for path in (ROOT / "moba_train" / folder).rglob("*.py")
        if asks.search(path.read_text())
    }
    assert found == {"attention/kernels/table.py"}


def test_kernels_are_imported_only_when_they_run(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, torch\nfrom moba_train.attention.moba import moba_attention\nimport moba_train.train\n"
        "moba_attention(*[torch.zeros(9, 1, 16)] * 3, block_size=4, topk=2)\n"
        "ours = [name for name in sys.modules if name.startswith('moba_train')]\n"
        "print([name for name in ours if {'triton', 'tl', 'gl'} & vars(sys.modules[name]).keys()])"
    )
    output, _ = ForkedProgram([str(tmp_path / "program.py")], tmp_path / "output").communicate()
    assert output == "[]\n"


def test_the_example_of_the_lists_is_true() -> None:
    pytest.importorskip("triton")
    from moba_train.attention.kernels.common import lists

    result = doctest.testmod(lists)
    assert (result.failed, result.attempted > 8) == (0, True)


def test_lists_whose_last_part_would_end_beyond_int32_are_refused() -> None:
    """Fewer entries than 2**31, but not so many whole parts: the kernels would count to a negative end."""
    pytest.importorskip("triton")
    from moba_train.attention.kernels.common import lists

    tokens, group, selected, blocks = 1_056_832, 16, 127, 258
    chunks, chunk = lists.chunking(tokens, group * selected, blocks)
    assert tokens * group * selected < 2**31 <= chunks * chunk
    with pytest.raises(ValueError, match=r"are 2147482624 entries; fewer than 2147483648, up to rounding, allowed"):
        lists.invert(torch.empty(group, tokens, selected, dtype=torch.int32, device="meta"), 1, blocks)
