"""The table of kernels: the one that runs for a block size, head width, dtype, GPU and release of Triton, and why.

Rows are tried from top to bottom; the first that takes the facts runs. No other file of attention asks for a compute
capability, a release or a package. Facts need no tensor, so a stage knows its backend before it begins
(`resolve_backend`). Decided later, where a batch is known: dense attention instead of blocks, where every block is
selected; the reference, where token ranges of a shard are less than a block apart; another backend than `composed`,
where a transport gives a part of the keys.
"""

import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import ranges_problem
from moba_train.attention.layout import Layout

HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
"""The oldest compute capability that Triton supports. Programs before it have 64 or 96 KiB of shared memory."""
_HOPPER = (9, 0)
_GLUON_TRITON = os.environ.get("MOBA_GLUON_TRITON", "3.6")
"""Release of Triton with which the kernels in Gluon were checked and timed on a GPU. With 3.7 to 3.9 they compile,
spill up to 216 bytes, one in its loop with 3.9, and never ran: set MOBA_GLUON_TRITON=3.7 to try them with 3.7."""
_MOST_HISTORY = 127
"""History blocks of a query at most: topk up to 128. More were never tested; lists count to 2**31 slots."""


@dataclass(frozen=True)
class Machine:
    """The facts of a device that decide about kernels."""

    device: str
    """torch's device type: "cuda", "cpu", ..."""
    capability: tuple[int, int] | None = None
    """Compute capability; None without CUDA."""
    triton: str | None = None
    """Installed release of Triton, such as "3.6.0"; None: none, or it cannot run on this device."""
    interpreted: bool = False
    """TRITON_INTERPRET=1 is set: kernels run on the CPU, in float32 as well, for tests."""
    packages: frozenset[str] | None = None
    """Names of the varlen kernels that are installed; None: this process looks for them, which takes seconds."""


@dataclass(frozen=True)
class Facts:
    """The facts of block-sparse attention that decide about kernels."""

    machine: Machine
    dtype: torch.dtype
    head_width: int
    block_size: int
    history_blocks: int
    """Blocks that a query selects before its own, at most (`BlockOptions.history_blocks`)."""
    rows: int
    """Query rows of a call: tokens x query heads."""
    whole: bool = True
    """Queries and keys are the whole sequence, not a rank's shard."""
    all_keys: bool = True
    """Every call is given all keys, not a part of them as around a ring."""

    @classmethod
    def from_call(cls, q_THD: Tensor, layout: Layout, block_size: int, history_blocks: int) -> "Facts":
        """Facts of a call with these queries on this layout."""
        tokens, heads, width = q_THD.shape
        return cls(
            this_machine(q_THD.device),
            q_THD.dtype,
            width,
            block_size=block_size,
            history_blocks=history_blocks,
            rows=tokens * heads,
            whole=layout.is_whole,
            all_keys=layout.k_ranges is None,
        )


def this_machine(device: torch.device) -> Machine:
    """Facts of a device of this process."""
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu and torch.cuda.is_available() else None
    release = triton_release() if has_triton() and (on_gpu or interpreted()) else None
    return Machine(device.type, capability, release, interpreted())


@cache
def has_triton() -> bool:
    """True if the package is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def triton_release() -> str:
    """Release of the installed Triton, which is imported."""
    import triton

    return str(triton.__version__)


def launcher_is_known() -> bool:
    """True for the release of Triton whose private launcher common/launch.py calls."""
    return triton_release().startswith("3.6.")


def interpreted() -> bool:
    """True if TRITON_INTERPRET=1 is set."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Kernel(NamedTuple):
    """A row of the table: a kernel of our own, for bf16 and fp16 on CUDA."""

    does: str
    """select, forward, backward or decode."""
    file: str
    block_sizes: Sequence[int] | None
    """Keys of a block; None: any."""
    head_widths: tuple[int, ...]
    why: str
    """Measured effect, for the page; LOG.md and the comment of the row say more."""
    gluon: bool = False
    """Written in Gluon: needs compute capability 9.0, Triton 3.6 and all keys, not a part of them."""
    history: bool = False
    """Queries must select blocks before their own."""

    def problem(self, facts: Facts) -> str:
        """The reason why the kernel cannot run; empty if it can."""
        machine = facts.machine
        if machine.device != "cuda" and not machine.interpreted:
            return f"tensors are on {machine.device}, not on CUDA"
        if machine.capability and machine.capability < _AMPERE:
            return f"compute capability {machine.capability}, 8.0 or newer needed"
        if machine.triton is None:
            return "the package triton is not installed"
        if facts.dtype not in HALF and not machine.interpreted:
            return f"dtype {facts.dtype}, bfloat16 or float16 needed"
        if reason := self.size_problem(facts.head_width, facts.block_size, facts.history_blocks):
            return reason
        if self.history and not facts.history_blocks:
            return "no history blocks"
        if self.gluon and not facts.all_keys:
            return "a part of the keys"
        if self.gluon and machine.capability != _HOPPER:  # asked last, as is the release: only where that costs speed
            if machine.capability:
                _warn_of_slower(f"compute capability {machine.capability}, the fastest kernels are for {_HOPPER}")
            return f"compute capability {machine.capability}, {_HOPPER} needed"
        if self.gluon and not machine.triton.startswith(f"{_GLUON_TRITON}."):
            why = f"Triton {machine.triton} is installed, but the fastest kernels of this GPU need {_GLUON_TRITON}"
            _warn_of_slower(why, f"; install a release of torch that comes with Triton {_GLUON_TRITON}")
            return f"Triton {machine.triton}, {_GLUON_TRITON} needed"
        return ""

    def size_problem(self, head_width: int, block_size: int | None, history_blocks: int) -> str:
        """The reason why the kernel cannot run on any machine with these sizes; empty if it can. None: any block."""
        if head_width not in self.head_widths:
            return f"head dim {head_width}, {' or '.join(map(str, self.head_widths))} needed"
        if history_blocks > _MOST_HISTORY:
            return f"{history_blocks} history blocks of a query, at most {_MOST_HISTORY} (topk {_MOST_HISTORY + 1})"
        if self.block_sizes is not None and block_size is not None and block_size not in self.block_sizes:
            return f"block_size {block_size}, {sizes_text(self.block_sizes)} needed"
        return ""


@cache
def _warn_of_slower(why: str, remedy: str = "") -> None:
    """Warn once in a process that faster kernels cannot run here."""
    lost = (f"the {row.does} pass with blocks of {sizes_text(row.block_sizes or ())}" for row in KERNELS if row.gluon)
    warnings.warn(f"{why}: block-sparse attention takes slower ones for {'; '.join(lost)}{remedy}", stacklevel=2)


_SHORT = range(64, 129, 16)
_LONG = range(144, 16385, 16)
_WIDTHS = (64, 128)

TRITON = Kernel("forward", "triton/backend.py", range(64, 16385, 16), _WIDTHS, "")
"""Limits of the backend `triton` as a whole."""

# Scores are never written: at 1M tokens in blocks of 128 they would be 1 TB. Block sizes do not matter to it.
_SELECT = Kernel("select", "moba/gate_kernels.py", None, _WIDTHS, "64K 128/8: 1.8 ms, 3.5 by insertion alone")
# One program for the heads that read equal keys; its tiles divide a block.
_DECODE = Kernel("decode", "triton/decode.py", range(16, 2**31, 16), _WIDTHS, "1M, full: 4.1 TB/s of an H200's 4.8")

KERNELS = (
    _SELECT,
    # One warp copies keys, one values, two gather rows, two warpgroups multiply. Slower for shorter blocks: 32K 128/8
    # 4.23 ms for 3.22, and 256 keys gain 5 % only; 512, 1024 and 4096 were measured
    # (benchmarks/results/attention-forward-h200.json). Other widths than 128 compile but were not measured.
    Kernel(
        "forward",
        "hopper/blocks_from_512_forward.py",
        range(512, 16385, 128),
        (128,),
        "32K 512/3: 1.83 ms, by Triton 2.27; shorter blocks are slower",
        gluon=True,
    ),
    # The keys of a block are one tile and stay on chip; a row is gathered once.
    Kernel("forward", "triton/blocks_to_128.py", _SHORT, _WIDTHS, "64K 128/8: 4.7 ms, by row tiles 7.3"),
    # With 512 keys or more a row's products outweigh its gather, so tiles are as large as registers allow.
    Kernel("forward", "triton/blocks_from_144_forward.py", _LONG, _WIDTHS, "128K 4096/12: 155 ms, 533 TFLOP/s"),
    # Longer blocks would gather their rows once for each tile of keys: 32K 512/3 7.63 ms for 6.70
    # (benchmarks/results/attention-gradients-gathered-h200-again.json).
    Kernel(
        "backward",
        "hopper/blocks_128_gradients.py",
        (128,),
        (128,),
        "32K 128/8, both passes: 9.67 ms, by Triton 10.6",
        gluon=True,
        history=True,
    ),
    # Five products instead of seven. Sizes between these were not measured. More than 8 tiles of keys add up dq in
    # float32, which costs 10 to 13 %.
    Kernel(
        "backward",
        "hopper/blocks_256_to_4096_gradients.py",
        (256, 512, 1024, 2048, 4096),
        (128,),
        "32K 512/3, both passes: 7.06 ms, by two passes 9.45",
        gluon=True,
        history=True,
    ),
    # dq, dk and dv from one gather; the same with several tiles of keys, for 256 and 512 keys, was slower than packing.
    Kernel("backward", "triton/blocks_to_128.py", _SHORT, _WIDTHS, "64K 128/8: 10.2 ms, by three passes 18.2"),
    # dq by row tiles, dk and dv (blocks_from_144_dkdv.py) from packed rows, as gathered addresses were the bottleneck.
    Kernel("backward", "triton/blocks_from_144_dq.py", _LONG, _WIDTHS, "128K 4096/12: dk and dv 356 ms, unpacked 527"),
    _DECODE,
)
"""Our kernels. `backward`: dq, dk and dv."""


def kernel_for(does: str, facts: Facts) -> Kernel:
    """The row that runs. Raises ValueError, with the reason of every row, if there is none."""
    reasons = []
    for row in KERNELS:
        if row.does == does:
            if not (reason := row.problem(facts)):
                return row
            reasons.append(f"{row.file}: {reason}")
    raise ValueError(f"no kernel for the {does} pass: {'; '.join(reasons)}")


class Varlen(NamedTuple):
    """A row of the table: a kernel for attention inside segments (varlen/kernels.py)."""

    name: str
    majors: Sequence[int]
    """Major numbers of the compute capabilities that it runs on, in bf16 and fp16; (): on the CPU, in any dtype."""
    widest: int
    """Widest head, which is a multiple of 8; on the CPU any width is taken."""
    why: str
    module: str = ""
    """Module of the package that it needs, with these functions, each with these parameters."""
    functions: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()
    composed_from: int | None = None
    """Block size from which `composed` on this kernel was measured to beat `triton`; None: it does not."""

    def problem(self, machine: Machine, dtype: torch.dtype, head_width: int) -> str:
        """The reason why the kernel cannot run; empty if it can."""
        device = "cuda" if self.majors else "cpu"
        if machine.device != device:
            return f"tensors are on {machine.device}, not on {'CUDA' if self.majors else 'the CPU'}"
        if not self.majors:
            return ""
        if dtype not in HALF:
            return f"dtype {dtype}, bfloat16 or float16 needed"
        if head_width % 8 or head_width > self.widest:
            return f"head dim {head_width}, a multiple of 8 up to {self.widest} needed"
        if machine.capability is None or machine.capability[0] not in self.majors:
            return f"compute capability {machine.capability}, {self.capabilities()} needed"
        if machine.packages is not None:
            return "" if self.name in machine.packages else "not installed"
        if self.module:
            return _lacks(self.module, self.functions, self.parameters)
        return "" if torch.backends.cuda.is_flash_attention_available() else "this build of torch has none"

    def capabilities(self) -> str:
        """The compute capabilities, for people."""
        if isinstance(self.majors, range):
            return f"{self.majors[0]}.0 or newer"
        return ", ".join(f"{major}.x" for major in self.majors)


_FROM_AMPERE = range(8, 100)
VARLEN = (
    # The package shares its name space with FlashAttention-2 and exists as pre-releases only, so functions and
    # parameters count, not its version: written against 4.0.0b18. Its backward pass does not compile for a width of
    # 192. `composed` on it wins from 2048 keys on: its backward pass is five products at 520 TFLOP/s (128K 2048/12 356
    # ms, Triton 430; 32K 512/3 15.9 and 10.5; 1024 was not measured).
    Varlen(
        "flash-attn-4",
        (9, 10, 11),
        128,
        "32K: 51 ms, FlashAttention-2 93",
        "flash_attn.cute.interface",
        ("_flash_attn_fwd", "_flash_attn_bwd"),
        frozenset({"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "softmax_scale"}),
        composed_from=2048,
    ),
    Varlen("torch's FlashAttention-2", _FROM_AMPERE, 256, "comes with torch"),
    # The names with _wrapped came with release 2.7, and with them the parameters that are used.
    Varlen(
        "flash-attn 2",
        _FROM_AMPERE,
        256,
        "for builds of torch without one",
        "flash_attn.flash_attn_interface",
        ("_wrapped_flash_attn_varlen_forward", "_wrapped_flash_attn_varlen_backward"),
    ),
    Varlen("torch's CPU kernel", (), 0, "for tests of `composed` without a GPU"),
)
"""Kernels for attention inside segments, fastest first."""


@cache
def _lacks(module: str, functions: tuple[str, ...], parameters: frozenset[str]) -> str:
    """The functions, each with these parameters, that an optional package lacks; empty if it has all."""
    try:
        for name in functions:
            function = getattr(importlib.import_module(module), name)
            if missing := parameters - inspect.signature(function).parameters.keys():
                return f"{module}.{name} has no parameter {', '.join(sorted(missing))}"
    except Exception as error:  # a broken build raises anything
        return f"{type(error).__name__}: {error}"
    return ""


@cache
def varlen_problem(name: str, device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """The reason why a varlen kernel cannot run in this process; empty if it can."""
    return next(row for row in VARLEN if row.name == name).problem(this_machine(device), dtype, head_width)


def varlen_for(facts: Facts) -> Varlen | None:
    """The fastest varlen kernel for these facts; None without any."""
    able = (row for row in VARLEN if not row.problem(facts.machine, facts.dtype, facts.head_width))
    return next(able, None)


_COMPOSED_ROWS = 2**21
"""Query rows from which the partial results of `composed` are small compared with what dense attention takes: at 64K
4096/12 with 8 heads, 2**19 rows, its peak was 1.31 of cuDNN's, by Triton 0.99."""
_COMPOSED_ROWS_OF_A_SHARD = 2**19
"""The fewest query rows that it was measured with in a shard, where all keys are in memory anyway: 4096/12 at 256K
under all-gather takes 375 ms, by Triton 488."""


class BackendChoice(NamedTuple):
    """The backends of a stage's block-sparse attention."""

    order: tuple[str, ...]
    """A batch takes the first that can do it; often there is one only."""
    why: str


def resolve_backend(key: str, wanted: str, facts: Facts) -> BackendChoice:
    """The backends for `wanted`: auto, triton, composed or reference. `key`: its YAML key, for messages.

    Raises ValueError, with the key, what was given and what is allowed, if the wanted one cannot run.
    """
    if wanted == "auto":
        return _best(facts)
    known = ("triton", "composed", "reference")
    if wanted not in known:
        raise ValueError(f"{key}: given {wanted!r}; allowed: auto, {', '.join(known)}")
    if reason := _problem(wanted, facts):
        allowed = ["auto", *(name for name in known if name != wanted and not _problem(name, facts))]
        raise ValueError(f"{key}: given {wanted!r}, which cannot run: {reason}; allowed: {', '.join(allowed)}")
    # The reference stands behind `composed` for a part of the keys, as a ring gives it.
    return BackendChoice((wanted, "reference") if wanted == "composed" else (wanted,), "as given")


def _problem(backend: str, facts: Facts) -> str:
    """The reason why a backend cannot run; empty if it can."""
    if backend == "reference":
        return ""
    if backend == "triton":
        return TRITON.problem(facts)
    reasons = {row.name: row.problem(facts.machine, facts.dtype, facts.head_width) for row in VARLEN}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) if all(reasons.values()) else ""


def _best(facts: Facts) -> BackendChoice:
    """Backends for `auto`: the fastest first."""
    if facts.machine.device != "cuda":
        return BackendChoice(("reference",), f"on {facts.machine.device}")
    no_triton = TRITON.problem(facts)
    varlen = varlen_for(facts) if no_triton or _may_pay(facts) else None
    composed_from = varlen.composed_from if varlen and _may_pay(facts) else None
    if varlen and composed_from and facts.block_size >= composed_from:
        order = ("composed", "reference") if no_triton else ("composed", "triton", "reference")
        return BackendChoice(order, f"on {varlen.name}, faster for blocks of {facts.block_size}")
    if not no_triton:
        why = f"which can do head dim {facts.head_width} and block_size {facts.block_size}"
        return BackendChoice(("triton", "reference"), why)
    if varlen:
        return BackendChoice(("composed", "reference"), f"on {varlen.name}; not triton: {no_triton}")
    return BackendChoice(("reference",), f"{no_triton}; {_problem('composed', facts)}")


def _may_pay(facts: Facts) -> bool:
    """False where `composed` is slower whatever the varlen kernel: without a look at the optional packages, which takes
    seconds."""
    most = _COMPOSED_ROWS if facts.whole else _COMPOSED_ROWS_OF_A_SHARD
    least = min(row.composed_from for row in VARLEN if row.composed_from)
    return facts.rows >= most and facts.all_keys and facts.block_size >= least


def triton_problem(device: str | None, head_width: int, block_size: int, history_blocks: int) -> str:
    """The reason why the backend `triton` cannot run in a stage; empty if it can. `device`: None if not known."""
    if device not in (None, "cuda") and not interpreted():
        return f"the run trains on {device}, CUDA needed"
    return TRITON.size_problem(head_width, block_size, history_blocks)


def call_problem(x: Tensor, layout: Layout, block_size: int, history_blocks: int) -> str:
    """The reason why Triton kernels, also those that select, cannot work on queries or keys like `x` ([tokens, heads,
    D]) of this layout, whatever the block size; empty if they can."""
    reason = _selection_problem(x.device, x.dtype, x.shape[-1], history_blocks, interpreted())
    return reason or ranges_problem(layout, block_size)


@cache
def _selection_problem(
    device: torch.device, dtype: torch.dtype, head_width: int, history_blocks: int, _interpreted: bool
) -> str:
    """Kept, as every call of a layer asks: facts take the host 20 us."""
    return _SELECT.problem(Facts(this_machine(device), dtype, head_width, 0, history_blocks, 0))


def kernel_decodes(q_BHD: Tensor, block_size: int = 16) -> bool:
    """True if triton/decode.py takes queries like these and blocks of `block_size` tokens."""
    half = q_BHD.dtype in HALF
    return half and triton_runs_on(q_BHD) and not _DECODE.size_problem(q_BHD.shape[-1], block_size, 0)


def triton_runs_on(x: Tensor) -> bool:
    """True if Triton kernels can work on tensors of this one's device."""
    return has_triton() and (x.is_cuda or interpreted())


def triton_multiplies(x: Tensor) -> bool:
    """True if kernels that multiply rows like those of `x` ([..., width]) can run: 16-bit dtypes on CUDA, and widths
    that a tile holds."""
    half = x.dtype in HALF or (interpreted() and x.dtype == torch.float32)
    return triton_runs_on(x) and half and x.shape[-1] in (16, 32, 64, 128)


def sizes_text(sizes: Sequence[int]) -> str:
    """`sizes` in words."""
    if isinstance(sizes, range):
        limits = f" from {sizes[0]} to {sizes[-1]}" if len(sizes) < 10**6 else ""
        return f"a multiple of {sizes.step}{limits}"
    return ", ".join(map(str, sizes))
