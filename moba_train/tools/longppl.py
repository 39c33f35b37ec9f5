"""LongPPL (Fang et al. 2024, arXiv:2410.23771): perplexity of the tokens whose prediction gains by a long context.

A token is a key token (equations 2 to 5) if its log-probability given all tokens before it is above `beta`, and above
that given the last ones only by more than `alpha`. As in the paper's program, a window of the last tokens moves on
by `step` tokens at a time, so that the short context of a token has `window` to `window` + `step` - 1 tokens. Here
LongPPL is the exponential of the mean loss of all key tokens; the program averages perplexities of texts.

Windows are packed, as documents, into passes of at most as many tokens as the text has. Together they read
`window` / `step` + 1 tokens for each token of the text behind the first window, 5 as in the paper; none if the key
tokens are given.
"""

import base64
import binascii
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from pydantic import Field

from moba_train.config.base import MOST_SAMPLES, Length
from moba_train.config.evaluation import ATTENTION, EVERY
from moba_train.data.batch import collate
from moba_train.data.long_documents import count_samples
from moba_train.data.samples import Sample
from moba_train.errors import DataError, ForeignFileError
from moba_train.evals.evaluation import (
    EvaluationContext,
    EvaluationResult,
    EvaluationSetting,
    finite,
    full_attention,
    without_full,
)
from moba_train.evals.position_wise import LongDocumentEvaluation
from moba_train.foreign_files import read_foreign_json
from moba_train.parallel.forward import token_losses
from moba_train.tools.needle.answers import padded_length
from moba_train.tools.needle.options import NamesFiles

Losses = npt.NDArray[np.float64]
"""[sequences, tokens], in nats."""
Keys = npt.NDArray[np.bool_]
"""[sequences, tokens]: True for the label of a key token."""

SHORT_CONTEXT = 4096
"""Tokens of the short context in the paper, and of `window` in longer sequences."""


class LongPPLConfig(NamesFiles):
    """LongPPL (Fang et al. 2024, arXiv:2410.23771): perplexity of the tokens that gain by the long context, on samples
    of `seq_len` tokens that lie inside one validation document. See docs/how-to/evaluate.md."""

    window: Length | None = Field(
        None, description="tokens of the short context; null: 4096 as in the paper, at most half of seq_len"
    )
    step: Length | None = Field(
        None, description="tokens by which the short context moves on, and may be longer; null: a quarter of `window`"
    )
    alpha: float = Field(2.0, ge=0, description="a key token gains more than this by the long context, in nats")
    beta: float = Field(-2.0, le=0, description="a key token's log-probability with the long context is above this")
    keys: str | None = Field(
        None,
        min_length=1,
        description="evaluation.json of moba-train eval on another model, which has chosen the key tokens; null: "
        "chosen by full attention on the same weights",
    )
    sequences: int = Field(
        16, ge=2, le=MOST_SAMPLES, description="samples; fewer if the documents do not give that many"
    )
    every: int | None = EVERY
    attention: Literal["own", "both"] = ATTENTION

    def named_files(self) -> list[str]:
        """The other model's result."""
        return [self.keys] if self.keys is not None else []

    def windows(self, seq_len: int) -> tuple[int, int]:
        """`window` and `step` for sequences of this length."""
        window = self.window or min(SHORT_CONTEXT, max(1, seq_len // 2))
        return window, self.step or max(1, window // 4)


class LongPPL(LongDocumentEvaluation[LongPPLConfig]):
    """Perplexity and loss of the key tokens, and their share of all tokens."""

    name = "longppl"
    Options = LongPPLConfig
    data_name = "longppl_tokens"
    numbers = frozenset({"longppl", "key_loss", "key_loss_error", "key_share"})
    numbers_against_full = frozenset({"longppl_full", "key_gap", "key_gap_error"})

    def __init__(self, options: LongPPLConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        seq_len = setting.stage.seq_len
        self._given: Keys | None = None
        if len(self._samples) and options.keys is not None:
            given = _read_keys(options.keys)
            if given["seq_len"] != seq_len:
                found = f"{self.key}.keys: {options.keys} has key tokens of {given['seq_len']} tokens"
                self.missing = f"{found}, not of the stage's {seq_len}"
            else:
                self._given = self._keys_of(given["keys"])

    @classmethod
    def problems(cls, options: LongPPLConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No documents to evaluate on, a short context that is as long as the sequences of the stage, and nothing that
        chooses key tokens."""
        yield from super().problems(options, setting)
        stage = setting.stage
        if options.keys is None and (lacking := without_full(stage.attention)):
            yield f"{cls.key}.keys: given none, but {lacking}, which chooses key tokens; set keys"
        window, step = options.windows(stage.seq_len)
        if stage.evaluate and window + step > stage.seq_len:
            given = f"{cls.key}.window: given {window}, with step {step}"
            yield f"{given}; allowed: together at most stages[{stage.index}].seq_len {stage.seq_len}"

    @classmethod
    def data_problems(cls, options: LongPPLConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No document that is long enough."""
        if not count_samples(setting.validation, setting.stage.seq_len):
            yield f"data.validation has no document longer than {setting.stage.seq_len} tokens; hold out longer ones"

    @classmethod
    def check_samples(cls, options: LongPPLConfig, setting: EvaluationSetting) -> None:
        """Raise DataError when `keys` cannot be read, or lacks a sample."""
        cls(options, setting)

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """All attentions on the same key tokens."""
        losses = {name: self._long(context, name) for name in context.each_attention()}
        keys = self._given if self._given is not None else self._choose(context, losses.get("full"))
        documents = self._samples.documents
        found = {name: mean_over_documents(values, keys, documents) for name, values in losses.items()}
        own = found[context.own]
        numbers = {
            "longppl": own.perplexity,
            "key_loss": own.mean,
            "key_loss_error": own.error,
            "key_share": float(keys.mean()),
        }
        message = f"LongPPL {own.perplexity:.3f} (95 %: {own.interval}) with {context.own} attention"
        if "full" in losses and context.own != "full":
            gap = mean_over_documents(losses[context.own] - losses["full"], keys, documents)
            full = found["full"].perplexity
            numbers |= {"longppl_full": full, "key_gap": gap.mean, "key_gap_error": gap.error}
            message += f", {full:.3f} with full; loss of key tokens {gap.mean:+.4f} +- {gap.error:.4f} against full"
        if not keys.any():
            message = "LongPPL unknown: no token gains by the long context as alpha and beta ask"
        window, step = self._options.windows(self._samples.seq_len)
        chosen = self._options.keys or "full attention on the same weights"
        data = {
            "attention": context.own,
            "seq_len": self._samples.seq_len,
            "window": window,
            "step": step,
            "alpha": self._options.alpha,
            "beta": self._options.beta,
            "chosen_by": chosen,
            "documents": documents,
            "key_tokens": keys.sum(1).tolist(),
            "attentions": {
                name: {
                    "longppl": found[name].perplexity,
                    "key_loss": found[name].mean,
                    "key_loss_error": found[name].error,
                    "loss": float(values.mean()),
                    "key_loss_sums": (values * keys).sum(1).tolist(),
                }
                for name, values in losses.items()
            },
            "keys": dict(zip(self._hashes(), map(_packed, keys), strict=True)),
        }
        table = [f"{'':<24}" + "".join(f"{name:>20}" for name in losses)]
        table += [f"{'LongPPL':<24}" + "".join(f"{found[name].perplexity:>20.3f}" for name in losses)]
        table += [f"{'95 % interval':<24}" + "".join(f"{found[name].interval:>20}" for name in losses)]
        table += [f"{'perplexity':<24}" + "".join(f"{math.exp(values.mean()):>20.3f}" for values in losses.values())]
        share = f"{keys.sum():,} key tokens of {keys.size:,} ({keys.mean():.2%}) in {len(set(documents))} documents"
        table.append(f"{share}, chosen by {chosen}; short contexts of {window} to {window + step - 1} tokens")
        return EvaluationResult(numbers, message, [*table, message], finite(data))

    def _long(self, context: EvaluationContext, name: str) -> Losses:
        """Loss of every label given all tokens before it, with the model's present attention."""

        def whole(sequence: int) -> Sample:
            sample = self._samples.sample(sequence)
            return replace(sample, loss_weight=np.arange(1, len(sample.tokens) + 1, dtype=np.float32))

        passes = [(sequence, partial(whole, sequence)) for sequence in range(len(self._samples))]
        return self._losses(context, passes, f"longppl, {name}")

    def _choose(self, context: EvaluationContext, long: Losses | None) -> Keys:
        """The key tokens by full attention, whose losses with the long context are `long`; None: not yet computed."""
        # Where the recipe's attention has none, and this is tried, all layers of the stage have full attention.
        full = full_attention(context.attentions[context.own]) or context.stage.attention
        for name in replace(context, attentions={"full": full}).each_attention():
            found = self._long(context, f"{name}, to choose") if long is None else long
            short = self._losses(context, [*self._windows(context)], "longppl, short contexts")
        # A label that no window has is predicted from less than a window: 0 is less than its loss, so it is no key.
        return (short - found > self._options.alpha) & (found < -self._options.beta)

    def _windows(self, context: EvaluationContext) -> Iterator[tuple[int, Callable[[], Sample]]]:
        """Number of the sequence, and maker of the sample, of each pass that reads windows."""
        seq_len = self._samples.seq_len
        window, step = self._options.windows(seq_len)
        # The first window would read what the long context has.
        starts = range(step, seq_len - window + 1, step)
        together = max(1, seq_len // (window + step - 1))
        length = padded_length(min(together, len(starts)) * (window + step - 1), context.data_shard)
        for sequence in range(len(self._samples)):
            for first in range(0, len(starts), together):
                read = starts[first : first + together]
                yield sequence, partial(self._packed_windows, sequence, read, window, step, length)

    def _packed_windows(self, sequence: int, starts: Sequence[int], window: int, step: int, length: int) -> Sample:
        """The windows that begin at these tokens, as documents of one sample; the rest is padding."""
        sample = self._samples.sample(sequence)
        tokens = np.zeros(length, dtype=np.int64)
        labels = np.zeros(length, dtype=np.int64)
        weight = np.zeros(length, dtype=np.float32)
        lengths: list[int] = []
        for start in starts:
            stop = min(start + window - 1 + step, len(sample.tokens))
            at = sum(lengths)
            lengths.append(stop - start)
            tokens[at : at + stop - start] = sample.tokens[start:stop]
            labels[at : at + stop - start] = sample.labels[start:stop]
            weight[at + window - 1 : at + stop - start] = np.arange(start + window, stop + 1)
        padding = length - sum(lengths)
        return Sample(tokens, labels, weight, [*lengths, padding] if padding else lengths, [])

    @torch.no_grad()
    def _losses(
        self, context: EvaluationContext, passes: Sequence[tuple[int, Callable[[], Sample]]], what: str
    ) -> Losses:
        """Loss of the labels that carry weight, 0 for others, equal on every rank. A label's weight is its place in the
        sequence, counted from 1: by it ranks know their rows, in whatever order they hold them.

        Called on all ranks together: each data-parallel rank makes the same number of passes.
        """
        shard = context.data_shard
        found = torch.zeros(len(self._samples), self._samples.seq_len, dtype=torch.float64, device=context.device)
        for index, counts in context.passes(len(passes), what):
            sequence, sample = passes[index]
            batch = shard.shard_batch(collate([sample()])).to(context.device)
            losses_n = token_losses(context.model, batch)
            if counts and batch.loss_tokens:
                found[sequence, batch.loss_weight.long() - 1] = losses_n.double()
        dist.all_reduce(found)  # each label is on exactly one rank; all others have 0
        return found.cpu().numpy()

    def _hashes(self) -> list[str]:
        """SHA-256 of the tokens and labels of each sample, by which key tokens are found again."""
        samples = map(self._samples.sample, range(len(self._samples)))
        return [
            hashlib.sha256(np.append(one.tokens, one.labels[-1]).astype("<i8").tobytes()).hexdigest() for one in samples
        ]

    def _keys_of(self, given: dict[str, str]) -> Keys:
        """The key tokens of the samples among those `given`. Raises DataError when one is not among them."""
        hashes = self._hashes()
        absent = sum(digest not in given for digest in hashes)
        if absent:
            raise DataError(
                f"{self.key}.keys: given {self._options.keys}, which lacks {absent} of {len(hashes)} samples; evaluate "
                "both models with the same data.validation, tokenizer, seed, seq_len and at most as many sequences"
            )
        try:
            return np.stack([_unpacked(given[digest], self._samples.seq_len) for digest in hashes])
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(f"{self.key}.keys: given {self._options.keys}, whose key tokens are damaged") from error


@dataclass(frozen=True)
class DocumentMean:
    """Mean over key tokens, and its standard error over documents, because tokens of one document are alike."""

    mean: float
    error: float

    @property
    def perplexity(self) -> float:
        """Exponential of the mean."""
        return math.exp(self.mean)

    @property
    def interval(self) -> str:
        """Interval of 95 % of the perplexity, as text."""
        if math.isnan(self.error):
            return "unknown"
        ends = (math.exp(self.mean + side * 1.96 * self.error) for side in (-1, 1))
        return " to ".join(f"{end:.3f}" for end in ends)


def mean_over_documents(values: Losses, keys: Keys, documents: Sequence[int]) -> DocumentMean:
    """Mean of `values` over the key tokens; NaN without any.

    The error is that of a ratio of two sums over documents (Cochran, Sampling Techniques, section 2.11); NaN for a
    single document.
    """
    counts = np.bincount(documents, keys.sum(1))
    total = counts.sum()
    if not total:
        return DocumentMean(math.nan, math.nan)
    sums = np.bincount(documents, (values * keys).sum(1))
    mean = sums.sum() / total
    number = len(counts)
    squares = ((sums - mean * counts) ** 2).sum()
    error = math.sqrt(number / (number - 1) * squares) / total if number > 1 else math.nan
    return DocumentMean(float(mean), float(error))


def _packed(keys_T: npt.NDArray[np.bool_]) -> str:
    """The marks of one sample as text: bits, compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(np.packbits(keys_T).tobytes())).decode()


def _unpacked(text: str, seq_len: int) -> npt.NDArray[np.bool_]:
    """`seq_len` marks. Raises binascii.Error, zlib.error, ValueError for text that `_packed` did not make."""
    size = -(-seq_len // 8)
    bits = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size)
    if len(bits) != size:
        raise ValueError(f"{len(bits)} bytes instead of {size}")
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=seq_len).astype(bool)


def _read_keys(path: str) -> dict[str, Any]:
    """`seq_len` and `keys` of another model's result. Raises DataError when it cannot be read, or is none."""
    try:
        found = read_foreign_json(Path(path))[LongPPL.name]
        if isinstance(found["seq_len"], int) and isinstance(found["keys"], dict):
            return {"seq_len": found["seq_len"], "keys": {str(name): str(key) for name, key in found["keys"].items()}}
        problem = "its seq_len or keys are of another type"
    except (OSError, ForeignFileError) as error:
        problem = str(error)
    except (KeyError, TypeError) as error:
        problem = f"it has no {error}"
    raise DataError(
        f"{LongPPL.key}.keys: given {path}, which holds no key tokens: {problem}; give the evaluation.json of "
        f"moba-train eval MODEL --tasks {LongPPL.name} --output FOLDER"
    )
