"""The costs that a plan counts for self-distillation and for gates that learn: against what is computed and kept."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moba_train.attention.kind import AttentionKind, MicroBatch
from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.distillation import Distillation, DistillOptions
from moba_train.memory.devices import H200
from moba_train.memory.flops import Documents
from moba_train.model.build import build_attention
from moba_train.model.loss import ChunkLoss, chunk_loss, weighted_loss_sum
from moba_train.model.transformer import Transformer
from tests.memory.test_memory import config
from tests.resolved import plan_of

MODEL = ModelConfig(vocab_size=2, hidden_size=48, intermediate_size=16, layers=1, heads=6, kv_heads=2, head_dim=16)
TOKENS = 256
ROWS, VOCABULARY = 64, 2048
LENGTH = 16384
MOBA = {"default": "moba", "full_layers": "last:2"}


def planned(ranks: int = 1, cp: int = 1, attention: dict[str, Any] = MOBA, **distill: Any) -> Any:
    """The plan of a stage of 16 layers, two of them with full attention, and its step."""
    stage = {"name": "only", "seq_len": LENGTH, "tokens": "16M"} | ({"distill": distill} if distill else {})
    changes = {"batch_tokens": ranks // cp * LENGTH, "activation_checkpointing": "none", "compile": True}
    recipe = config("llama-1b", "16K", attention, stages=[stage], parallel={"cp": cp}, **changes)
    plan = plan_of(recipe, ranks, documents=[Documents((LENGTH,), from_corpora=True)])
    return plan.stages[0], plan.steps[0]


def test_a_teacher_costs_its_forward_pass_and_its_logits() -> None:
    """In half of the steps half of that; where outputs of attention are compared, full attention in 14 layers alone."""
    from moba_train.tools.plan.rates import shipped_rates

    rates = shipped_rates(H200)
    alone, labels = planned()
    item, step = planned(weight=0.5)
    time = step.time
    assert labels.time.objective == 0
    own = {name: value for name, value in vars(time).items() if name not in ("objective", "loss", "memory")}
    assert own.items() <= vars(labels.time).items()
    full = 4 * 2048 * LENGTH**2 / 2 / rates.attention_rate(item.stage.attention[-1], 64, LENGTH).forward
    full *= 16 / rates.attention_in_step
    copies = time.memory - labels.time.memory  # of weights, gathered once more
    assert copies > 0
    assert time.objective == pytest.approx(full + (labels.time.products + labels.time.memory) / 3, rel=0.05)
    logits = LENGTH * 128256
    traffic = Distillation.costs(DistillOptions(), item.stage.attention).logit_traffic - rates.compiled_loss_bytes
    more = logits * (2 * 2048 / rates.products + traffic / rates.memory)
    assert time.loss - labels.time.loss == pytest.approx(more)
    assert item.memory.total > alone.memory.total

    _, half = planned(every=2)
    assert half.time.objective == pytest.approx(time.objective / 2)
    assert half.time.loss == pytest.approx((time.loss + labels.time.loss) / 2)
    _, rarely = planned(every=2, full_every=3)
    assert rarely.time.objective == pytest.approx(time.objective * (1 / 2 - 1 / 6))
    kept, compared = planned(on="attention")
    assert compared.time.objective == pytest.approx(full * 14 / 16)
    assert compared.time.loss == labels.time.loss
    activations = kept.memory.activations - alone.memory.activations
    assert activations == 14 * 4 * 2048 * LENGTH


def test_a_teacher_gathers_the_weights_once_more() -> None:
    """Each of two ranks receives half of each bf16 weight of the blocks."""
    (_, labels), (_, step) = planned(2), planned(2, weight=0.5)
    blocks = 16 * (2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 2 * 2048)
    assert step.traffic["fsdp"].node - labels.traffic["fsdp"].node == 2 * blocks / 2


def test_a_teacher_exchanges_keys_and_values() -> None:
    """A rank has nearly all keys and values of its windows; full attention needs those of both ranks."""
    windows = {"default": "window", "window": {"window": 512}}
    (_, alone), (_, step) = (planned(cp, cp, windows, weight=0.5) for cp in (1, 2))
    assert step.time.objective > alone.time.objective / 2
    assert step.time.cp < step.time.objective - alone.time.objective / 2


class Logits(TorchDispatchMode):
    """Counts, inside, bytes of each logit that operations read and write, and the most that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.traffic = 0.0
        self.peak = 0.0

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), further: Any = None) -> Any:
        result = function(*arguments, **(further or {}))
        given, made = ([x for x in tree_leaves(one) if _is_logits(x)] for one in ((arguments, further), result))
        is_view = {x.untyped_storage()._cdata for x in made} <= {x.untyped_storage()._cdata for x in given}
        touches_few = any(part in str(function) for part in ("nll_loss", "gather", "scatter"))
        if not touches_few and (not is_view or "_." in str(function) or not made):
            self.traffic += sum(x.nbytes for x in given + made) / (ROWS * VOCABULARY)
        for x in made:
            storage = x.untyped_storage()
            self._living.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._living = {key: found for key, found in self._living.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._living.values()) / (ROWS * VOCABULARY))
        return result


def _is_logits(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == ROWS * VOCABULARY


def counted(of_chunk: ChunkLoss, *prepared: Tensor) -> Logits:
    hidden_nD, weight_VD = (torch.randn(rows, 8).bfloat16().requires_grad_() for rows in (ROWS, VOCABULARY))
    labels_n = torch.randint(VOCABULARY, (ROWS,))
    with Logits() as logits:
        weighted_loss_sum(hidden_nD, weight_VD, labels_n, torch.arange(ROWS), torch.ones(ROWS), of_chunk, prepared)
    return logits


def test_logits_of_a_distilled_chunk_take_what_is_counted() -> None:
    """The count of the cross entropy's operations is near its measured rate."""
    from moba_train.tools.plan.rates import shipped_rates

    assert counted(chunk_loss).traffic == pytest.approx(shipped_rates(H200).eager_loss_bytes, rel=0.15)
    options = DistillOptions()
    costs = Distillation.costs(options, [])
    found = counted(Distillation(options).of_chunk, torch.randn(ROWS, 8).bfloat16())
    assert found.peak == costs.logit_peak
    assert found.traffic == pytest.approx(costs.logit_traffic, rel=0.05)


def kept_bytes(layer: LayerAttention, kind: AttentionKind) -> float:
    """Bytes of each token that a block with this attention keeps for its backward pass, in bf16."""
    own = KINDS[layer.kind].parameters(layer.options, MODEL, 0)
    model = Transformer(MODEL, [{} if own is None else {layer.kind: own}]).bfloat16()
    model.set_attention([kind])
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def noted(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() >= 8 * TOKENS and storage._cdata not in weights:
            kept[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    x_TD = torch.randn(TOKENS, MODEL.hidden_size).bfloat16().requires_grad_()
    layout = packed_layout([TOKENS], torch.device("cpu"))
    with saved_tensors_hooks(noted, lambda tensor: tensor):
        results = model.run_blocks(model.blocks, x_TD, torch.arange(TOKENS), layout)
    found = sum(size for storage, size in kept.values() if not storage.expired())
    del results  # which keep them
    return found / TOKENS


def layer_of(kind: str, **options: Any) -> LayerAttention:
    return LayerAttention(kind, KINDS[kind].Options.model_validate(options))


FULL = layer_of("full")
SIZES = {"block_size": 16, "topk": 8}


@pytest.mark.parametrize(
    ("layer", "lists"),
    [
        (layer_of("msa", mode="warmup", **SIZES), 0),
        (layer_of("msa", index_keys="group", mode="warmup", **SIZES), 0),
        (layer_of("msa", **SIZES), 4 * 6 * 7),
        (layer_of("msa", index_keys="group", kl_every=8, **SIZES), 4 * 6 * 7),
        (layer_of("msa", train_gate=False, **SIZES), 4 * 6 * 7),
        (layer_of("msa", index_dim=16, **SIZES), 4 * 6 * 7),
        (layer_of("indexer", mode="warmup", **SIZES, local_blocks=1), 0),
        (layer_of("indexer", **SIZES, local_blocks=1), 0),
        (layer_of("indexer", index_heads=2, mode="warmup", **SIZES, local_blocks=1), 0),
        (layer_of("indexer", index_heads=4, **SIZES, local_blocks=1), 0),
        (layer_of("indexer", index_heads=4, train_gate=False, **SIZES, local_blocks=1), 0),
    ],
)
def test_gates_that_learn_keep_what_is_counted(layer: LayerAttention, lists: int) -> None:
    """lists: bytes of the inverse lists of blocks, which plain PyTorch does not keep."""
    (kind,), (full,) = (build_attention([one], MODEL.head_width) for one in (layer, FULL))
    found = kind.token_bytes(MODEL, MicroBatch(2, TOKENS, TOKENS, 1))
    assert kept_bytes(layer, kind) - kept_bytes(FULL, full) == found.saved + found.activations - lists


def test_compared_outputs_keep_what_is_counted() -> None:
    layer = layer_of("moba", block_size=16, topk=2)
    build = partial(build_attention, head_dim=MODEL.head_width)
    options = DistillOptions(on="attention")
    (own,) = build([layer])
    (compared,) = Distillation(options)._others([own])
    found = kept_bytes(layer, compared) - kept_bytes(layer, own)
    assert found == Distillation.costs(options, [layer]).kept_bytes * MODEL.heads * MODEL.head_width
