"""`moba-train calibrate`: measures the rates of this machine's GPU, by which `plan` and `tune` predict steps.

The parts of a step are timed alone, for up to a second each, in a layer of Llama-3-8B's shape: matrix products, copies,
the loss, an optimizer's update, a whole block (compiled and not), and the attention of every registered kind. Two rates
follow from others. The time of a block without its products and its attention gives the number of passes over its
activations. Blocks with two sequence lengths differ only by attention's excess, which gives its speed in a step, where
the GPU is at its power limit.

Without a GPU, tiny shapes are measured on the CPU in seconds, for tests of the programs that use the rates.
"""

import datetime
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kind import LayerInput, StageContext, SublayerInput, TwoSublayers
from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.config.optim import OptimConfig
from moba_train.config.precision import PrecisionConfig
from moba_train.memory.devices import H200, local_gpu, local_host_memory
from moba_train.memory.layer_memory import block_bytes
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.model.loss import CompiledChunkLoss, chunk_loss, weighted_loss_sum
from moba_train.model.spec import attention_matrices
from moba_train.model.transformer import Transformer
from moba_train.optim.registry import OPTIMIZERS, build_optimizer, set_learning_rate
from moba_train.output_files import write_new
from moba_train.parallel.activations import wrap_blocks
from moba_train.parallel.context.comm import all_gather
from moba_train.parallel.float8 import compile_for_float8, convert_linears, float8_problem
from moba_train.tools.plan.rates import MEASURED_MODEL, MeasuredLayer, Rates, shipped_rates

Options = Mapping[str, int | str]

_VARIANTS: Mapping[str, Sequence[Options]] = {
    "full": ({"backend": "auto"},),
    "moba": ({"block_size": 128, "topk": 8}, {"block_size": 512, "topk": 8}, {"block_size": 4096, "topk": 12}),
}
"""Options that the kinds measured first have, each also with heads of half the width. Other kinds have their defaults,
in each of their modes if they have some."""


class Shapes(NamedTuple):
    """Sizes and times of the measurements."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    lengths: tuple[int, ...]
    """Tokens of attention, ascending; the first two are those of whole blocks."""
    bytes: int
    """Size of a copy, and of a gather between GPUs."""
    part_s: float
    """Time for which a part of a step is repeated: long enough for a GPU to reach its power limit."""
    attention_s: float
    """Time for which an attention is repeated."""


ON_GPU = Shapes(4096, 14336, 128256, (8192, 32768, 131072), 1 << 28, 1.0, 0.25)
ON_CPU = Shapes(512, 512, 256, (128, 256), 1 << 16, 0.01, 0.01)


MINUTES = 4.0
"""No attention except full and moba is begun later, so long sequences of rare kinds are left out first."""


def calibrate(say: Callable[[str], object]) -> Iterator[Rates]:
    """The rates of this machine's first GPU, or without one of its CPU in tiny shapes.

    Yields them first without the attention of rare kinds, and again after each layer of those that was measured: one
    whose kernels are tuned when they first run can take longer than all else.

    say: gets a line for everything that was measured
    """
    deadline = time.monotonic() + 60 * MINUTES
    yield from Calibration("cuda" if torch.cuda.is_available() else "cpu", say).rates(deadline)


class Calibration:
    """All measurements on one device."""

    def __init__(self, device: str, say: Callable[[str], object]) -> None:
        self._device = torch.device(device)
        self._on_gpu = device == "cuda"
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._shapes = ON_GPU if self._on_gpu else ON_CPU
        self._tokens = self._shapes.lengths[0]
        sizes = {name: getattr(self._shapes, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
        self._model = MEASURED_MODEL.model_copy(update={"head_dim": None, **sizes})
        self._matrices = attention_matrices(self._model) + feed_forward_costs(self._model, 0).active
        self._say = say
        self._full_s: dict[int, float] = {}
        """Seconds of full attention in a block, forward and backward, by the length."""
        self._left_out: dict[str, str] = {}  # with the reason

    def rates(self, deadline: float) -> Iterator[Rates]:
        """The rates, after each layer of a rare kind again; those to measure after `deadline` (time.monotonic) are left
        out."""
        product_s = 1 / self._report("products", self._products(), 1e12, "TFLOP/s")
        memory = self._report("memory", self._memory(), 1e9, "GB/s")
        layers = list(self._attention(_VARIANTS, math.inf))
        compiled_s, long_s = (self.block(tokens, compiled=self._on_gpu) for tokens in self._shapes.lengths[:2])
        in_step = self._attention_in_step(compiled_s, long_s)
        passes = self._passes(compiled_s, self._on_gpu, product_s, memory, in_step)
        eager_passes = self._passes(self.block(self._tokens, False), False, product_s, memory, in_step)
        loss_bytes = {
            compiled: max(1.0, memory * (self._loss(compiled) - 6 * self._model.hidden_size * product_s))
            for compiled in (True, False)
        }
        float8 = self._float8_products(passes, memory, in_step)
        updates = {name: seconds for name in OPTIMIZERS.usable() if (seconds := self._update(name)) is not None}
        bandwidth = node_bandwidth(torch.cuda.device_count(), "nccl", self._shapes.bytes)
        gpu = local_gpu()
        today = datetime.datetime.now(datetime.UTC).date()
        rates = Rates(
            format=1,
            gpu=gpu.name if gpu else f"CPU ({platform.machine()})",
            gpu_memory=gpu.memory if gpu else local_host_memory(1),
            note=f"measured by moba-train calibrate, {today}, torch {torch.__version__}",
            sources={"all": "parts of a step, timed alone"},
            products=1 / product_s,
            float8_products=float8,
            memory=memory,
            compiled_passes=passes,
            eager_passes=eager_passes,
            float8_weight_bytes=shipped_rates(H200).float8_weight_bytes,
            compiled_loss_bytes=loss_bytes[True],
            eager_loss_bytes=loss_bytes[False],
            attention_in_step=in_step,
            update_s=updates,
            node_bandwidth=bandwidth,
            attention=tuple(layers),
        )
        yield self._with_layers(rates, layers, "all other attention: the calibration was interrupted")
        others = sorted(set(KINDS.usable()) - set(_VARIANTS))
        for layer in self._attention({kind: _modes(kind) for kind in others}, deadline):
            layers.append(layer)
            yield self._with_layers(rates, layers, "all other attention: the calibration was interrupted")
        yield self._with_layers(rates, layers)

    def _with_layers(self, rates: Rates, layers: Sequence[MeasuredLayer], *left_out: str) -> Rates:
        named = "; ".join([*map(": ".join, self._left_out.items()), *left_out])
        sources = {**rates.sources, "left out": named}
        return rates.model_copy(update={"attention": tuple(layers), "sources": sources})

    def _report(self, what: str, value: float, unit: float, name: str) -> float:
        """`value`, in four digits, after it was said."""
        self._say(f"{what}: {value / unit:.4g} {name}")
        return _rounded(value)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)

    def _seconds(self, call: Callable[[], object], repeated_s: float) -> float:
        """Seconds of a call, on average of calls that are queued back to back for so long, as in training."""

        def total(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                call()
            if self._on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        total(1)  # compiles, and fills the allocator
        once = total(1)
        count = min(1000, int(repeated_s / once))
        return total(count) / count if count > 1 else once

    def _products(self) -> float:
        """Operations per second of the products with one of the feed-forward's matrices, forward and backward."""
        hidden, inner = self._model.hidden_size, self._model.intermediate_size
        x, w, dy = (self._random(*sizes) for sizes in ((self._tokens, hidden), (inner, hidden), (self._tokens, inner)))

        def products() -> None:
            torch.mm(x, w.T)
            torch.mm(dy, w)
            torch.mm(dy.T, x)

        return 6 * self._tokens * w.numel() / self._seconds(products, self._shapes.part_s)

    def _memory(self) -> float:
        """Bytes per second that the sum of two tensors reads and writes."""
        a, b, out = (self._random(self._shapes.bytes // self._dtype.itemsize) for _ in range(3))
        return 3 * self._shapes.bytes / self._seconds(lambda: torch.add(a, b, out=out), self._shapes.part_s)

    def _small_model(self, dtype: torch.dtype) -> Transformer:
        """One block, and the ends of a vocabulary of two."""
        with self._device:
            transformer = Transformer(self._model.model_copy(update={"vocab_size": 2}))
        initialize_weights(transformer, seed=0)
        return transformer.to(dtype)

    def block(self, tokens: int, compiled: bool, float8: bool = False) -> float:
        """Seconds of a block with full attention to one document, forward and backward."""
        torch.compiler.reset()  # what is compiled for several lengths would be other code
        transformer = self._small_model(self._dtype)
        if float8:
            precision = PrecisionConfig(linear="fp8")
            convert_linears(transformer, precision)
            compile_for_float8(precision)
        wrap_blocks(transformer, compiled)
        full = LayerAttention("full", KINDS["full"].Options())
        transformer.set_attention(build_attention([full], self._model.head_width))
        x_TD, dout_TD = (self._random(tokens, self._model.hidden_size) for _ in range(2))
        leaves = [x_TD.requires_grad_(), *transformer.blocks.parameters()]
        layout = packed_layout([tokens], self._device)
        positions_T = torch.arange(tokens, device=self._device)

        def both() -> None:
            out_TD, _ = transformer.run_blocks(transformer.blocks, x_TD, positions_T, layout)
            torch.autograd.grad(out_TD, leaves, dout_TD)

        return self._seconds(both, self._shapes.part_s)

    def _attention_in_step(self, short_s: float, long_s: float) -> float:
        """Speed of full attention in blocks of two lengths, which take so long, relative to its speed alone."""
        short, long = self._shapes.lengths[:2]
        excess_s = long_s - long / short * short_s  # all but attention grows with the tokens
        alone_s = self._full_s[long] - long / short * self._full_s[short]
        in_step = min(1.25, max(0.5, alone_s / max(excess_s, 1e-9)))
        return self._report("attention in a block", in_step, 0.01, "% of its speed alone")

    def _passes(self, block_s: float, compiled: bool, product_s: float, memory: float, in_step: float) -> float:
        """Number of passes over the bytes of its activations that a block of `block_s` seconds takes."""
        rest_s = block_s - 6 * self._tokens * self._matrices * product_s - self._full_s[self._tokens] / in_step
        passes = max(1.0, rest_s * memory / self._block_bytes(compiled))
        return self._report(f"{'compiled' if compiled else 'eager'} block", passes, 1.0, "passes over its activations")

    def _block_bytes(self, compiled: bool) -> float:
        width = self._dtype.itemsize
        block = block_bytes(self._model, width, 1, compiled, input_width=width)
        return (block.attention + block.feed_forward) * self._tokens

    def _float8_products(self, passes: float, memory: float, in_step: float) -> float | None:
        """Operations per second of a compiled block's products in FP8; None without torchao or a GPU that has FP8."""
        if problem := float8_problem(PrecisionConfig(linear="fp8"), self._device.type):
            self._left_out["FP8"] = problem
            return None
        moved = passes * self._block_bytes(True) + shipped_rates(H200).float8_weight_bytes * self._matrices
        try:
            block_s = self.block(self._tokens, compiled=True, float8=True)
        except Exception as error:  # torchao's versions differ
            self._left_out["FP8"] = _reason(error)
            return None
        seconds = max(1e-9, block_s - moved / memory - self._full_s[self._tokens] / in_step)
        return self._report("FP8 products", 6 * self._tokens * self._matrices / seconds, 1e12, "TFLOP/s")

    def _loss(self, compiled: bool) -> float:
        """Seconds of the output projection and the loss for each logit."""
        rows, vocabulary = self._tokens, self._model.vocab_size
        hidden_TD = self._random(rows, self._model.hidden_size).requires_grad_()
        weight_VD = self._random(vocabulary, self._model.hidden_size).requires_grad_()
        labels_n = torch.randint(vocabulary, (rows,), device=self._device)
        index_n = torch.arange(rows, device=self._device)
        weights_n = torch.full((rows,), 1 / rows, device=self._device)
        of_chunk = CompiledChunkLoss() if compiled and self._on_gpu else chunk_loss

        def both() -> None:
            loss = weighted_loss_sum(hidden_TD, weight_VD, labels_n, index_n, weights_n, of_chunk)
            torch.autograd.grad(loss, [hidden_TD, weight_VD])

        seconds = self._seconds(both, self._shapes.part_s)
        name = f"{'compiled' if compiled else 'eager'} loss of {rows} tokens"
        return self._report(name, seconds, 1e-3, "ms") / (rows * vocabulary)

    def _update(self, name: str) -> float | None:
        """Seconds of an optimizer's step for each parameter, with float32 weights; None if it fails."""
        transformer = self._small_model(torch.float32)
        for parameter in transformer.parameters():
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        try:
            optimizer = build_optimizer(transformer, OptimConfig(kind=name), self._device)
            set_learning_rate(optimizer, 1e-6)
            seconds = self._seconds(optimizer.step, self._shapes.part_s)
        except Exception as error:  # an optimizer of another package may need what is not here
            self._left_out[f"optimizer {name}"] = _reason(error)
            return None
        parameters = sum(parameter.numel() for parameter in transformer.parameters())
        return self._report(f"update by {name}", seconds / parameters, 1e-12, "ps a parameter")

    def _attention(self, kinds: Mapping[str, Sequence[Options]], deadline: float) -> Iterator[MeasuredLayer]:
        """The attention of these kinds with these options, shortest sequences first."""
        measured = set()
        width = self._model.head_width
        widths = {kind: (width, width // 2) if kind in _VARIANTS else (width,) for kind in kinds}
        rows = [(kind, options, head_dim) for kind in kinds for options in kinds[kind] for head_dim in widths[kind]]
        for tokens in self._shapes.lengths:
            for kind, options, head_dim in rows:
                name = " ".join([kind, *(f"{key}={value}" for key, value in options.items())])
                layer = LayerAttention(kind, KINDS[kind].Options.model_validate(options))
                model = MEASURED_MODEL.model_copy(update={"head_dim": head_dim})
                context = StageContext(model, tokens, 1, 1, False, self._device.type, layers="in the layer")
                problem = next(iter(KINDS[kind].problems(layer.options, context)), "")
                if time.monotonic() > deadline:
                    problem = "no time left"
                try:
                    forward_s, both_s = (0.0, 0.0) if problem else self._attention_seconds(layer, model, tokens)
                except Exception as error:  # out of memory, or a package that is not installed
                    problem = _reason(error)
                if problem:
                    self._left_out.setdefault(name, problem)
                    continue
                measured.add(name)
                if kind == "full" and head_dim == width:
                    self._full_s[tokens] = both_s
                self._say(f"{name}, {tokens} tokens, head width {head_dim}: {1e3 * both_s:.4g} ms")
                times = {"forward_ms": _rounded(1e3 * forward_s), "both_ms": _rounded(1e3 * both_s)}
                yield MeasuredLayer(kind=kind, options=options, head_dim=head_dim, tokens=tokens, **times)
        self._left_out = {name: why for name, why in self._left_out.items() if name not in measured}

    def _attention_seconds(self, layer: LayerAttention, model: ModelConfig, tokens: int) -> tuple[float, float]:
        """Seconds of a kind's forward pass, and of both, without the rotary embedding, which a block's passes have."""
        if self._on_gpu:
            torch.cuda.empty_cache()
        (kind,) = build_attention([layer], model.head_width)
        with self._device:
            parameters = KINDS[layer.kind].parameters(layer.options, model, layer=0)
        own = [] if parameters is None else [*parameters.parameters()]
        for parameter in own:  # buffers keep their dtype, as under FSDP
            parameter.data = 0.02 * torch.randn_like(parameter, dtype=self._dtype)
        x_TD = self._random(tokens, model.hidden_size)
        q_THd, dout_THd = (self._random(tokens, model.heads, model.head_width) for _ in range(2))
        k_TKd, v_TKd = (self._random(tokens, model.kv_heads, model.head_width) for _ in range(2))
        inputs = [x.requires_grad_() for x in (x_TD, q_THd, k_TKd, v_TKd)]
        layout = packed_layout([tokens], self._device)
        given = LayerInput(x_TD, q_THd, k_TKd, v_TKd, lambda x: x, layout, LOCAL_ENGINE, lambda x, positions: x)
        between = SublayerInput(x_TD, lambda x: x, layout, LOCAL_ENGINE)
        leaves = [*inputs, *(parameter for parameter in own if parameter.requires_grad)]

        def forward() -> list[tuple[Tensor, Tensor]]:
            """Results with a gradient, each with one that reaches it."""
            out_THd, auxiliary_T = kind.mix(given, parameters)
            results = [(out_THd, dout_THd)]
            if isinstance(kind, TwoSublayers):
                results.append((kind.second_sublayer(between, parameters), x_TD))
            if auxiliary_T is not None:
                results.append((auxiliary_T, torch.ones_like(auxiliary_T)))
            return [(out, gradient) for out, gradient in results if out.requires_grad]

        def both() -> None:
            results, gradients = zip(*forward(), strict=True)
            torch.autograd.grad(results, leaves, gradients, allow_unused=True)

        return self._seconds(forward, self._shapes.attention_s), self._seconds(both, self._shapes.attention_s)


def _modes(kind: str) -> Sequence[Options]:
    """Options for each mode of a kind that is always in one of several; of a gate also as `sparsify` trains it, with
    the divergence of every eighth query."""
    fields = KINDS[kind].Options.model_fields
    mode = fields.get("mode")
    if mode is None or mode.default is None:
        return [{}]
    found: list[Options] = [{"mode": value} for value in get_args(mode.annotation)]
    return found + [{**options, "kl_every": 8} for options in found if "kl_every" in fields]


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def node_bandwidth(ranks: int, backend: str, size: int) -> float | None:
    """Bytes per second that a GPU receives in all-gathers of `size` bytes among `ranks` GPUs; None for fewer than two.

    backend: nccl, or gloo for processes on the CPU
    """
    if ranks < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gather_rank, (ranks, backend, size, folder), ranks)
        return float(Path(folder, "bandwidth").read_text())


def _gather_rank(rank: int, ranks: int, backend: str, size: int, folder: str) -> None:
    """One process of `node_bandwidth`."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    own = torch.zeros(size // ranks, dtype=torch.uint8, device=device)
    whole = torch.zeros(ranks * len(own), dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(8):
        dist.barrier()
        began = time.perf_counter()
        all_gather(whole, own)
        if backend == "nccl":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        write_new(Path(folder, "bandwidth"), str((len(whole) - len(own)) / sorted(seconds)[len(seconds) // 2]))
    dist.destroy_process_group()
