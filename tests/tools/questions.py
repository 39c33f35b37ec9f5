"""A tokenizer, a corpus and recipes for questions about long texts, and a model that answers them by reading."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.train_tokenizer import train_tokenizer
from moba_train.attention.layout import Layout
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.evals.evaluation import EvaluationContext, with_full
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.tools.needle.answers import encode_segments
from moba_train.tools.needle.haystack import NOISE, WORDS
from moba_train.tools.needle.needle import Needle, NeedleTexts
from moba_train.tools.needle.options import NeedleConfig
from moba_train.tools.text_tokenizer import load_tokenizer
from tests.evals.setting import stage_setting
from tests.resolved import stages_of

VOCAB = 512
PROSE = "the quick brown fox jumps over lazy dogs while reading long documents about sparse attention . It rained."


def write_data(folder: Path) -> None:
    """A tokenizer and a corpus of prose without digits."""
    lines = [f"One of the special magic numbers for {word} is: {hash_number(word)}." for word in WORDS[600:900]]
    templates = "Some special magic numbers are hidden within the following text. What are all mentioned in the text?"
    (folder / "text.txt").write_text("\n".join([*lines, *[NOISE] * 20, *[PROSE] * 20, *[templates] * 20]))
    train_tokenizer([str(folder / "text.txt")], folder / "tok.model", VOCAB, "text")
    tokenizer = load_tokenizer(folder / "tok.model")
    words = PROSE.split()
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
        for _ in range(30):
            text = " ".join(words[at] for at in rng.integers(len(words), size=200))
            assert tokenizer.eos_id is not None
            writer.add_document([*tokenizer.encode(text), tokenizer.eos_id])


def hash_number(word: str) -> int:
    """Seven digits that follow from the word."""
    return 10**6 + sum(ord(letter) * 7919**place for place, letter in enumerate(word)) % (9 * 10**6)


def recipe(folder: Path, seq_len: int, evaluation: dict[str, Any], **keys: Any) -> RunConfig:
    """A recipe of one stage with MoBA and one full layer."""
    values = {
        "name": "test",
        "run_dir": str(folder / "run"),
        "model": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "layers": 3,
            "heads": 4,
            "kv_heads": 2,
            "init_std": 0.3,
        },
        "attention": {"full_layers": "last:1", "moba": {"block_size": 16, "topk": 3, "backend": "reference"}},
        "data": {
            "train": [{"path": str(folder / "corpus")}],
            "validation": [{"path": str(folder / "corpus")}],
            "tokenizer": str(folder / "tok.model"),
        },
        "batch_tokens": seq_len,
        "stages": [{"name": "only", "seq_len": seq_len, "tokens": 2 * seq_len}],
        "evaluation": evaluation,
        "telemetry": {"console": False, "report": False, "wandb": {"mode": "disabled"}},
    }
    return parse_config(yaml.safe_dump(values | keys), "test")


def recipe_texts(config: RunConfig) -> NeedleTexts:
    """Questions of the recipe's section `needle`."""
    options = config.evaluation.options_of("needle")
    assert isinstance(options, NeedleConfig)
    return NeedleTexts(options, stage_setting(config), Needle.key, options.chat)


def context(config: RunConfig, model: Transformer) -> EvaluationContext:
    """MoBA and full attention on one device."""
    (stage,) = stages_of(config)
    return EvaluationContext(model, stage, DataShard(), next(model.parameters()).device, with_full(stage.attention))


class Reader(Transformer):
    """Answers needle questions from the last `sight` tokens before a token, by reading their text."""

    def __init__(self, config: RunConfig, sight: int) -> None:
        super().__init__(config.model)
        self.tokenizer = load_tokenizer(str(config.data.tokenizer))
        self.sight = sight
        self.seen: list[int] = []

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, rows_n: Tensor | None = None) -> Tensor:
        rows_n = torch.arange(len(tokens_T)) if rows_n is None else rows_n
        if positions_T[0] == 0:
            self.seen = []
        first = len(self.seen)
        self.seen += tokens_T.tolist()
        logits = torch.zeros(len(rows_n), VOCAB)
        for place, row in enumerate(rows_n.tolist()):
            read = self.seen[max(0, first + row + 1 - self.sight) : first + row + 1]
            logits[place, self.next_token(read)] = 1
        return logits

    def next_token(self, read: list[int]) -> int:
        """The first token of what is still missing of the answer; 0 where it is not known."""
        text = self.tokenizer.decode(read)
        match = re.search(r"magic numbers? for ([^?\n]*) mentioned in the provided text (is|are)([^?]*)$", text)
        if match is None:
            return 0
        keys = re.split(r", and |, ", match[1])
        values = [value for key in keys for value in re.findall(rf"magic numbers for {key} is: (\d+)\.", text)]
        parts = [part for at, value in enumerate(values) for part in ([","] if at else []) + [f" {value}"]]
        answer = [
            token for part in encode_segments(self.tokenizer, [text[: match.end(2)], *parts])[1:] for token in part
        ]
        written = (at for at in range(len(answer)) if self.tokenizer.decode(answer[:at]) == match[3])
        return next((answer[at] for at in written), 0)
