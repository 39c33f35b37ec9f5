"""`moba-train profile-spans`: a span for each attention head of a trained model, by the cost of masking the rest.

The cost is the first-order change of the loss if attention from one token to another were masked. With A the
probabilities of a row and g = dL/dA = dout . v, masking key j scales the others by 1 / (1 - A_j). So the loss changes
by E_j = A_j / (1 - A_j) (sum_n A_n g_n - g_j), and by -A_j g_j if j is the row's only key (Fu et al. 2024,
arXiv:2406.14909). Each head then gets one of several candidate spans, so that all together keep to a budget.

Shape suffixes: T tokens of a document, t a chunk of its queries, s keys, H query heads, K key/value heads, G = H / K,
D head width, N blocks of the document; L lengths of documents, Y layers, X heads of all layers, C candidates.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.reference import accumulation_dtype, query_chunks
from moba_train.attention.observer import AttentionCall, Observer
from moba_train.config.attention import LayerAttention
from moba_train.config.base import format_count
from moba_train.data.batch import collate
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import DataError, UserError
from moba_train.mechanisms.moa.spans import SpanRule, Spans
from moba_train.model.build import build_attention, observed_layers
from moba_train.model.transformer import Transformer
from moba_train.output_files import write_atomically
from moba_train.parallel.forward import training_loss
from moba_train.tools.evaluate import load_on_this_machine, tracked, training_of, warn_of_length
from moba_train.tools.saved_recipe import SavedRun


@torch.no_grad()
def block_influence(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, dout_THD: Tensor, *, scale: float, block_size: int
) -> Tensor:
    """Influences of full attention in one document, summed over blocks of queries and of keys, [H, N, N].

    q_THD, k_TKD: rotated
    dout_THD: gradient of the loss with respect to attention's output

    The result is float32, or float64 for float64.
    """
    tokens, heads, _ = q_THD.shape
    dtype = accumulation_dtype(q_THD.dtype)
    blocks = -(-tokens // block_size)
    k_TKD, v_TKD = k_TKD.to(dtype), v_TKD.to(dtype)
    token_T = torch.arange(tokens, device=q_THD.device)
    block_N1 = torch.arange(blocks, device=q_THD.device).unsqueeze(1)
    found_HNN = torch.zeros(heads, blocks, blocks, dtype=dtype, device=q_THD.device)
    for rows in query_chunks(tokens, heads * tokens, q_THD.device):
        keys = slice(0, rows.stop)
        scores_Hts = _products(q_THD[rows].to(dtype), k_TKD[keys]) * scale
        scores_Hts.masked_fill_(token_T[rows, None] < token_T[None, keys], -torch.inf)
        influence_Hts = _influence(scores_Hts.softmax(-1), _products(dout_THD[rows].to(dtype), v_TKD[keys]))
        if rows.start == 0:
            influence_Hts[:, 0, 0] = -_products(dout_THD[:1].to(dtype), v_TKD[:1])[:, 0, 0]
        influence_HtN = F.pad(influence_Hts, (0, blocks * block_size - rows.stop)).unflatten(-1, (blocks, -1)).sum(-1)
        within_Nt = (token_T[rows] // block_size == block_N1).to(dtype)  # not index_add_, whose order varies on a GPU
        found_HNN += within_Nt @ influence_HtN
    return found_HNN


def _influence(probs_Hts: Tensor, grad_Hts: Tensor) -> Tensor:
    """E of each key of each row, [H, t, s], for rows of several keys."""
    mean_Ht1 = (probs_Hts * grad_Hts).sum(-1, keepdim=True)
    rest_Hts = (1 - probs_Hts).clamp_(min=torch.finfo(probs_Hts.dtype).eps)
    return probs_Hts / rest_Hts * (mean_Ht1 - grad_Hts)


def _products(x_tHD: Tensor, y_sKD: Tensor) -> Tensor:
    """Products of query heads with the key/value head that they share, [H, t, s]."""
    x_tKGD = x_tHD.unflatten(1, (y_sKD.shape[1], -1))
    return torch.einsum("tkgd,skd->kgts", x_tKGD, y_sKD).flatten(0, 1)


def masked_influence(influence_HNN: Tensor, rules: Sequence[SpanRule], block_size: int) -> Tensor:
    """Sum of the influences that each rule would mask, if every head had it, float64 [H, C].

    influence_HNN: in blocks of `block_size` tokens, of which the rules' blocks are multiples
    """
    before_HNN = F.pad(influence_HNN.double().cumsum(-1), (1, 0))
    block_N = torch.arange(influence_HNN.shape[1], device=influence_HNN.device)
    return torch.stack([_masked(before_HNN, rule, block_N, block_size) for rule in rules], dim=1)


def _masked(before_HNN: Tensor, rule: SpanRule, block_N: Tensor, block_size: int) -> Tensor:
    """Sum of the influences between the sinks and the span, [H], from the sums before each block."""
    if not rule.block_size:
        return before_HNN.new_zeros(before_HNN.shape[0])
    longer = rule.block_size // block_size
    spans = Spans((rule,))
    starts_1N = spans.starts(block_N // longer)
    until_N, since_N = (x_1N[0] * longer for x_1N in (starts_1N, spans.sinks(starts_1N)))
    return (before_HNN[:, block_N, until_N] - before_HNN[:, block_N, since_N]).sum(-1)


_BETA_STEPS = 8
_BISECTIONS = 100


def candidate_rules(
    lengths: Sequence[int], *, block_size: int, sink_tokens: int, max_length: int
) -> tuple[SpanRule, ...]:
    """Spans from a block to the whole of a document: alpha a block, 2, 4, ... of them, 0, or a negative eighth or
    quarter of the longest length; beta in eighths.

    Each is at least a block in the shortest document and at most the longest one. The last one is full attention.
    """
    shortest, longest = min(lengths), max(lengths)
    powers = [block_size << power for power in range((longest // block_size).bit_length())]
    alphas = [-longest // 4, -longest // 8, 0, *powers]
    sizes = {"block_size": block_size, "sink_tokens": sink_tokens, "max_length": max_length}
    found = [
        SpanRule.fitted(alpha, step / _BETA_STEPS, **sizes)
        for alpha in alphas
        for step in range(_BETA_STEPS)
        if alpha + step / _BETA_STEPS * shortest >= block_size and alpha + step / _BETA_STEPS * longest <= longest
    ]
    return (*(rule for rule in found if rule.block_size), SpanRule.fitted(0, 1.0, **sizes))


def densities(rules: Sequence[SpanRule], lengths: Sequence[int]) -> Tensor:
    """Pairs of a query and a key that are attended to, as a share of full attention's, float64 [L, C]."""
    rows = [[rule.attended_pairs(torch.tensor([length])) * 2 / length**2 for rule in rules] for length in lengths]
    return torch.tensor(rows, dtype=torch.float64)


def choose_spans(masked_LXC: Tensor, density_LC: Tensor, budget: float) -> Tensor:
    """Candidate of each head, int64 [X], so that the mean density is within the budget at every length.

    Each head takes the candidate with the lowest sum of masked influence (mean over the lengths) and a price times its
    density; the price is the lowest that keeps to the budget (bisection). The rest of the budget then goes, head by
    head, to the changes that lower the influence most for their density. Raises UserError for a budget that the
    narrowest candidates exceed.
    """
    heads = masked_LXC.shape[1]
    density_C = density_LC.mean(0)
    order_C = density_C.argsort(stable=True)  # of equal candidates the narrowest wins
    loss_XC = masked_LXC.mean(0)[:, order_C]
    density_LC, density_C = density_LC[:, order_C], density_C[order_C]

    def cheapest(price: float) -> Tensor:
        return (loss_XC + price * density_C).argmin(1)

    def fits(chosen_X: Tensor) -> bool:
        return bool((density_LC[:, chosen_X].mean(1) <= budget + 1e-12).all())

    if not fits(torch.zeros(heads, dtype=torch.int64)):
        least = float(density_LC[:, 0].max())
        raise UserError(f"--budget: given {budget:g}; allowed: at least {least:.3g}, which the narrowest spans need")
    low, high = 0.0, 1.0
    while not fits(cheapest(high)):
        high *= 4
    if not fits(cheapest(low)):
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(cheapest(middle)) else (middle, high)
        low = high
    return order_C[_spend_the_rest(cheapest(low), loss_XC, density_LC, budget)]


def _spend_the_rest(chosen_X: Tensor, loss_XC: Tensor, density_LC: Tensor, budget: float) -> Tensor:
    """Change one head after the other while a change lowers the loss and fits the budget: most per density first."""
    heads = len(chosen_X)
    head_X = torch.arange(heads)
    while True:
        gain_XC = loss_XC[head_X, chosen_X, None] - loss_XC
        more_LXC = density_LC[:, None, :] - density_LC[:, chosen_X, None]
        room_L11 = (budget * heads - density_LC[:, chosen_X].sum(1)).view(-1, 1, 1)
        allowed_XC = (gain_XC > 0) & (more_LXC <= room_L11 + 1e-12).all(0)
        if not allowed_XC.any():
            return chosen_X
        rate_XC = gain_XC / more_LXC.mean(0).clamp(min=1e-12)
        best = int(torch.where(allowed_XC, rate_XC, -torch.inf).argmax())
        head, candidate = divmod(best, loss_XC.shape[1])
        chosen_X = torch.where(head_X == head, candidate, chosen_X)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `moba-train profile-spans`."""

    output: Path
    """New file for the piece of a recipe."""
    lengths: tuple[int, ...] = ()
    """Tokens of the documents; empty: a quarter, half and all of the stage's length."""
    budget: float = 0.5
    """Share of full attention's pairs that the heads may attend to, at each length."""
    samples: int = 8
    """Documents of each length."""
    block_size: int = 64
    sink_tokens: int = 64
    max_length: int | None = None
    """Longest document that the spans are for; None: the longest of `lengths`."""


def profile_spans(saved: SavedRun, options: ProfileOptions, echo: Callable[[str], object]) -> None:
    """Measure, choose, print, and write a piece of a recipe.

    saved: the recipe with the corpora to measure on as its validation data (tools/evaluated_recipe.py)
    echo: gets the lines to print

    Raises UserError for options that cannot work, before the model is loaded.
    """
    lengths = _checked_lengths(saved, options)
    max_length = options.max_length or max(lengths)
    sizes = {"block_size": options.block_size, "sink_tokens": options.sink_tokens, "max_length": max_length}
    rules = candidate_rules(lengths, **sizes)
    density_LC = densities(rules, lengths)
    vocab_size = saved.config.model.vocab_size
    sources = saved.config.data.validation
    data = [LongDocumentSamples(sources, length, options.samples, saved.config.seed, vocab_size) for length in lengths]
    for samples in data:
        if not len(samples):
            raise DataError(
                f"--lengths: given {samples.seq_len}, but no document of the held-out text is longer; give shorter "
                "--lengths, or --data with longer documents"
            )
        if len(samples) < options.samples:
            logger.warning(
                "The held-out text has only %d samples of %d tokens inside one document", len(samples), samples.seq_len
            )
    model = load_on_this_machine(saved)
    masked_LYHC = measure(model, data, rules, options.block_size)
    chosen_X = choose_spans(masked_LYHC.flatten(1, 2), density_LC, options.budget)
    chosen_YH = chosen_X.view(masked_LYHC.shape[1:3])
    for line in table(masked_LYHC, density_LC, chosen_YH, rules, lengths, options.budget):
        echo(line)
    by_layer = [[rules[candidate] for candidate in layer] for layer in chosen_YH.tolist()]
    source = ", ".join(dict.fromkeys([saved.config.name, saved.path.name]))
    write_atomically(options.output, fragment(by_layer, source, lengths, options, max_length))
    echo(f"written: {options.output}; a recipe uses it with `extends: [RECIPE, {options.output.name}]`")


def _checked_lengths(saved: SavedRun, options: ProfileOptions) -> tuple[int, ...]:
    """Lengths of documents, ascending. Raises UserError for options out of range, and without text to measure on."""
    if options.output.exists():
        raise UserError(f"--output: {options.output} exists and is not overwritten; give another file, or remove it")
    if not options.output.parent.is_dir():
        raise UserError(f"--output: the folder {options.output.parent} does not exist")
    if not 0 < options.budget <= 1:
        raise UserError(f"--budget: given {options.budget:g}; allowed: above 0, at most 1, which is full attention")
    if kinds := {layer.kind for layer in saved.stage.attention if (layer.full() or layer).kind != "full"}:
        raise UserError(f"given layers of {', '.join(sorted(kinds))}; allowed: those that kind full could replace")
    if not saved.config.data.validation:
        raise DataError("the recipe has no held-out text to measure on; give --data CORPUS")
    seq_len = saved.stage.seq_len
    lengths = tuple(sorted(set(options.lengths or (seq_len // 4, seq_len // 2, seq_len))))
    if lengths[0] <= options.block_size:
        given = "given" if options.lengths else "by default a quarter of the stage's length,"
        raise UserError(f"--lengths: {given} {lengths[0]}; allowed: above --block-size {options.block_size}")
    if options.max_length is not None and options.max_length < lengths[-1]:
        raise UserError(
            f"--max-length: given {options.max_length}; allowed: at least {lengths[-1]}, the longest length"
        )
    warn_of_length(lengths[-1], training_of(saved))
    return lengths


def measure(
    model: Transformer, data: Sequence[LongDocumentSamples], rules: Sequence[SpanRule], block_size: int
) -> Tensor:
    """First-order change of the loss if a head's attention were masked by each rule, float64 [L, Y, H, C] in nats per
    token: the mean over the samples of each length. All layers have full attention."""
    config = model.config
    full = LayerAttention("full", FullAttention.Options())
    model.set_attention(build_attention([full] * config.layers, config.head_width))
    model.requires_grad_(False)
    model.embedding.weight.requires_grad_()  # gradients then reach all layers, and are kept for one matrix alone
    device = model.embedding.weight.device
    masked_LYHC = torch.zeros(len(data), config.layers, config.heads, len(rules), dtype=torch.float64)

    def add(at: int, samples: int, layer: int, influence_HNN: Tensor) -> None:
        masked_LYHC[at, layer] += masked_influence(influence_HNN, rules, block_size).cpu() / samples

    work = [(at, index) for at, samples in enumerate(data) for index in range(len(samples))]
    for number in tracked(range(len(work)), "measuring influences"):
        at, index = work[number]
        batch = collate([data[at].sample(index)]).to(device)
        see = partial(add, at, len(data[at]))
        observers = [InfluenceObserver(partial(see, layer), block_size) for layer in range(config.layers)]
        with observed_layers(model, LOCAL_ENGINE, observers):
            (training_loss(model, batch).loss / batch.loss_weight_sum).backward()
        model.embedding.weight.grad = None
    return masked_LYHC


class InfluenceObserver(Observer):
    """Calls `see` with the influences of a layer's attention when its backward pass begins."""

    def __init__(self, see: Callable[[Tensor], None], block_size: int) -> None:
        self._see = see
        self._block_size = block_size

    def attended(self, call: AttentionCall, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Waits for the gradient of the output."""
        scale = call.q_THD.shape[-1] ** -0.5

        def look(dout_THD: Tensor) -> None:
            tensors = call.q_THD, call.k_SKD, call.v_SKD, dout_THD
            self._see(block_influence(*tensors, scale=scale, block_size=self._block_size))

        out_THD.register_hook(look)


def table(
    masked_LYHC: Tensor,
    density_LC: Tensor,
    chosen_YH: Tensor,
    rules: Sequence[SpanRule],
    lengths: Sequence[int],
    budget: float,
) -> Iterator[str]:
    """Yield lines with the chosen spans of each layer, and their influence compared with one span for all heads."""
    names = [format_count(length, 1024) for length in lengths]
    spans_C = torch.tensor([min(max(rule.alpha + rule.beta * lengths[-1], 0), lengths[-1]) for rule in rules])
    yield f"{'layer':<6}" + "".join(f"{'density ' + name:>14}" for name in names) + f"   spans at {names[-1]}, sorted"
    for layer, chosen_H in enumerate(chosen_YH):
        density = "".join(f"{share:>14.3f}" for share in density_LC[:, chosen_H].mean(1).tolist())
        yield f"{layer:<6}{density}   {' '.join(f'{span:.0f}' for span in spans_C[chosen_H].sort().values.tolist())}"
    index_YH1 = chosen_YH.unsqueeze(-1)
    own_L = [float(masked_YHC.gather(-1, index_YH1).sum()) for masked_YHC in masked_LYHC]
    alike_LC = masked_LYHC.sum((1, 2))
    affordable_C = (density_LC <= budget + 1e-12).all(0)
    best = int(torch.where(affordable_C, alike_LC.mean(0), torch.inf).argmin())
    density = "".join(f"{share:>14.3f}" for share in density_LC[:, chosen_YH.flatten()].mean(1).tolist())
    yield f"{'all':<6}{density}   budget {budget:g}"
    rise = ", ".join(f"{value:+.4f} at {name}" for value, name in zip(own_L, names, strict=True))
    yield f"estimated change of the loss, nats per token: {rise}"
    rise = ", ".join(f"{value:+.4f} at {name}" for value, name in zip(alike_LC[:, best].tolist(), names, strict=True))
    yield f"with alpha {rules[best].alpha}, beta {rules[best].beta:g} in all heads: {rise}"


def fragment(
    by_layer: Sequence[Sequence[SpanRule]],
    source: str,
    lengths: Sequence[int],
    options: ProfileOptions,
    max_length: int,
) -> str:
    """Piece of a recipe with the spans of every layer's heads."""
    sizes = {"block_size": options.block_size, "sink_tokens": options.sink_tokens, "max_length": max_length}
    lines = [
        f"# Spans of kind moa for {source}: moba-train profile-spans, documents of",
        f"# {', '.join(map(str, lengths))} tokens, at most {options.budget:g} of full attention's pairs.",
        "# In a recipe: extends: [RECIPE.yaml, THIS.yaml]",
        "attention:",
        "  default: moa",
        f"  moa: {_flow(sizes)}",
        "  overrides:",
    ]
    for layer, rules in enumerate(by_layer):
        alpha, beta = [rule.alpha for rule in rules], [rule.beta for rule in rules]
        lines.append(f"    {layer}: {_flow({'alpha': alpha, 'beta': beta})}")
    return "\n".join(lines) + "\n"


def _flow(values: Mapping[str, object]) -> str:
    """A mapping in YAML's flow style."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "}"
