"""Tokenization speed of one core on real text, by engine, and whether the ids equal those of the tokenizer's library.

python -m benchmarks.tokenize --input FOLDER [--sentencepiece MODEL] [--output JSON]

The text consists of the .py, .rst, .md and .txt files of the folders. There are three types of tokenizers: a
sentencepiece model (given, or trained on the text), a byte-level tokenizer.json with Llama 3's pre-tokenization
(trained on the text), and tiktoken's cl100k (if bpe-openai is installed, which ships it). Packages that are not
installed are left out. Rates are tokens per second of processor time of one thread, each measured several times:
`first` is a first pass over the text by an engine just loaded, `again` a second pass, in which engines with a cache
have seen the text. `pipeline` is the complete path from JSON lines to a part of a corpus, with text that the engine has
seen.
"""

import argparse
import base64
import functools
import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import save, spread
from data_tools import encoders
from data_tools.documents import Chunk
from data_tools.input_files import find_files
from data_tools.tokenize_corpus import Part, TokenizeOptions, make_part
from data_tools.train_tokenizer import train_tokenizer

VOCAB_SIZE = 32_000
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

REPEATS = 3

Ids = Callable[[str], Any]
Load = Callable[[], encoders.Encode]


def other_engines(tokenizer_type: str, path: str) -> dict[str, tuple[str, Callable[[Any], Ids]]]:
    """Other packages for this type of tokenizer: import name, and a function from the module to the encoding."""

    def kitoken(constructor: str) -> Callable[[Any], Ids]:
        def load(module: Any) -> Ids:
            tokenizer = getattr(module.Kitoken, constructor)(path)
            return lambda text: tokenizer.encode(text, False)

        return load

    def encode_ids(tokenizer: Any) -> Ids:
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    def iree(module: Any) -> Ids:
        tokenizer = module.Tokenizer.from_file(path)
        return lambda text: tokenizer.encode_to_array(text, add_special_tokens=False)

    if tokenizer_type == "sentencepiece":
        return {"kitoken": ("kitoken", kitoken("from_sentencepiece_file"))}
    if tokenizer_type == "tokenizer.json":
        return {
            "kitoken": ("kitoken", kitoken("from_tokenizers_file")),
            "tokie": ("tokie", lambda module: encode_ids(module.Tokenizer.from_json(path))),
            "splintr-rs": ("splintr", lambda module: module.from_json(path).encode_ordinary),
            "iree-tokenizer": ("iree.tokenizer", iree),
        }
    return {
        "bpe-openai": ("bpe_openai", lambda module: module.get_encoding("cl100k_base").encode_ordinary),
        "rs-bpe": ("rs_bpe", lambda module: module.openai.cl100k_base().encode),
        "quicktok-v1": ("quicktok", lambda module: module.get_encoding("cl100k_base").encode_ordinary),
    }


def measure(name: str, load: Load, texts: Sequence[str], expected: list[Any] | None) -> dict[str, Any]:
    """Rates of one engine, its ids, and the number of texts with the ids `expected`.

    `expected` is None for the tokenizer's own library, which is the reference and has no cache.
    """
    rates: dict[str, list[float]] = {"first": []} if expected is None else {"first": [], "again": []}
    for _ in range(REPEATS):
        encode = load()
        for seconds in rates.values():
            begin = time.process_time()
            found = encode(texts)
            seconds.append(time.process_time() - begin)
    tokens = sum(map(len, found))
    row: dict[str, Any] = {key: spread([tokens / second / 1e6 for second in seconds]) for key, seconds in rates.items()}
    equal = len(texts) if expected is None else sum(map(np.array_equal, found, expected))
    medians = ", ".join(f"{key} {row[key]['median']:6.2f}" for key in rates)
    print(f"  {name:16} {medians} M tokens/s, equal {equal} of {len(texts)}", flush=True)
    return row | {"tokens": tokens, "equal": equal, "texts": len(texts), "ids": found}


def measure_type(tokenizer_type: str, tokenizer: str, texts: Sequence[str]) -> dict[str, Any]:
    """Measure all engines for one type of tokenizer; the first is the tokenizer's own library."""
    print(tokenizer_type)
    loaded = encoders.load_encoder(tokenizer)
    library = encoders.load_encoder(tokenizer, fast=False)
    own = measure(library.engine, lambda: library.reference, texts, None)
    expected = own.pop("ids")
    rows = {library.engine: own}
    if loaded.encode is not loaded.reference:
        rows[loaded.engine] = measure(loaded.engine, lambda: encoders.load_encoder(tokenizer).encode, texts, expected)
    for name, (module, load) in other_engines(tokenizer_type, tokenizer).items():
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue
        try:
            package = importlib.import_module(module)
            rows[name] = measure(name, functools.partial(one_by_one, load, package), texts, expected)
        except Exception as error:  # each package raises its own exception for an unsupported tokenizer
            rows[name] = {"error": str(error)[:200]}
            print(f"  {name:16} {error}")
    for row in rows.values():
        row.pop("ids", None)
    rates = {name: row["first"]["median"] for name, row in rows.items() if row.get("equal") == len(texts)}
    fastest = max(rates, key=lambda name: rates[name])
    return {"vocab_size": loaded.vocab_size, "shipped": loaded.engine, "fastest_first": fastest, "engines": rows}


def one_by_one(load: Callable[[Any], Ids], package: Any) -> encoders.Encode:
    """Wrap an engine that takes one text so that it takes many."""
    encode = load(package)
    return lambda texts: [encode(text) for text in texts]


def train_tokenizer_json(texts: Sequence[str], path: Path) -> None:
    """Train a byte-level BPE like Llama 3's and write it to `path`."""
    package: Any = importlib.import_module("tokenizers")
    pre_tokenizers = package.pre_tokenizers
    model = package.Tokenizer(package.models.BPE())
    split = pre_tokenizers.Split(package.Regex(LLAMA3_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = package.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    model.save(str(path))


def cl100k(tiktoken: Any) -> Any:
    """tiktoken's cl100k_base, from the file that bpe-openai ships, without a download."""
    file = Path(importlib.import_module("bpe_openai").__file__ or "").parent / "data" / "cl100k_base.tiktoken.gz"
    lines = (line.split() for line in gzip.decompress(file.read_bytes()).splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("cl100k_base", pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens={})


def pipeline(tokenizer: str, texts: Sequence[str], folder: Path) -> dict[str, float]:
    """Millions of tokens per second of processor time, from JSON lines to .bin and .idx."""
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = TokenizeOptions(tokenizer, "text", append_eos=False, holdout=0.0, fail_on_error=True)
    part = Part(str(folder / "part"), (Chunk(str(file), 0, file.stat().st_size),), options)
    make_part(part)  # loads the tokenizer
    rates = []
    for _ in range(REPEATS):
        begin = time.process_time()
        tokens = make_part(part).tokens
        rates.append(tokens / (time.process_time() - begin) / 1e6)
    return spread(rates)


def cpu_name() -> str:
    """Model name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", action="append", required=True)
    parser.add_argument("--sentencepiece", help="sentencepiece model; default: one trained on the text")
    parser.add_argument("--megabytes", type=float, default=40, help="text to read, as every n-th file (default 40)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tokenize-cpu.json"))
    args = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    files = find_files(args.input, ("*.py", "*.rst", "*.md", "*.txt"), ())
    every = max(1, round(sum(map(os.path.getsize, files)) / (args.megabytes * 1e6)))
    texts = [Path(file).read_text(encoding="utf-8", errors="ignore") for file in files[::every]]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} files, {megabytes:.1f} MB, on {cpu_name()}")

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.sentencepiece or str(folder / "tok.model")
        if not args.sentencepiece:
            train_tokenizer(files[::every], model, VOCAB_SIZE, "text")
        results["sentencepiece"] = measure_type("sentencepiece", model, texts)
        results["sentencepiece"]["pipeline"] = pipeline(model, texts, folder)
        if importlib.util.find_spec("tokenizers"):
            path = folder / "tokenizer.json"
            train_tokenizer_json(texts, path)
            results["tokenizer.json"] = measure_type("tokenizer.json", str(path), texts)
            results["tokenizer.json"]["pipeline"] = pipeline(str(path), texts, folder)
        if importlib.util.find_spec("tiktoken") and importlib.util.find_spec("bpe_openai"):
            tiktoken: Any = importlib.import_module("tiktoken")
            encoding = cl100k(tiktoken)
            tiktoken.get_encoding = lambda _name: encoding
            results["tiktoken"] = measure_type("tiktoken", "tiktoken:cl100k_base", texts)
            results["tiktoken"]["pipeline"] = pipeline("tiktoken:cl100k_base", texts, folder)
    for tokenizer_type, result in results.items():
        rate = result["pipeline"]["median"]
        fastest = result["fastest_first"]
        print(f"{tokenizer_type}: fastest on a first pass {fastest}; from JSON lines to a corpus {rate:.2f} M tokens/s")

    packages = ["sentencepiece", "tokenizers", "tiktoken", "fastokens", "kitoken", "tokie", "splintr-rs"]
    packages += ["iree-tokenizer", "bpe-openai", "rs-bpe", "quicktok-v1"]
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    settings = {
        "cpu": cpu_name(),
        "load": os.getloadavg()[0],
        "texts": len(texts),
        "megabytes": megabytes,
        "versions": versions,
    }
    save(args.output, settings | {"unit": "million tokens per second of processor time, one thread"}, results)


if __name__ == "__main__":
    main()
