"""How fast one core tokenizes real text, by engine, and whether the ids are those of the tokenizer's own library.

python -m benchmarks.tokenize --input FOLDER [--sentencepiece MODEL] [--output JSON]

The text is .py, .rst, .md and .txt files of the folders. Three kinds of tokenizers: a sentencepiece model (given, or
trained on the text), a byte-level tokenizer.json with Llama 3's way of cutting (trained on the text), and cl100k as
tiktoken reads it (where bpe-openai is installed, which ships it). Packages that are not installed are left out. Rates
are tokens per second of processor time of one thread, each measured several times: `first` for a first pass over the
text by an engine just loaded, `again` for a second one, whose text engines with a memory have seen. `pipeline` is the
whole way from JSON lines to a part of a corpus, engines having seen the text.
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
from data_tools.documents import Chunk, find_files
from data_tools.parts import Part, TokenizeOptions, make_part
from data_tools.train_tokenizer import train_tokenizer

VOCAB_SIZE = 32_000
LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_CUT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

REPEATS = 3

Ids = Callable[[str], Any]
Load = Callable[[], encoders.Encode]


def others(kind: str, path: str) -> dict[str, tuple[str, Callable[[Any], Ids]]]:
    """Further packages that know this kind of tokenizer: import name, and the encoding made from the module."""

    def kitoken(how: str) -> Callable[[Any], Ids]:
        def load(module: Any) -> Ids:
            tokenizer = getattr(module.Kitoken, how)(path)
            return lambda text: tokenizer.encode(text, False)

        return load

    def ids_of(tokenizer: Any) -> Ids:
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    def iree(module: Any) -> Ids:
        tokenizer = module.Tokenizer.from_file(path)
        return lambda text: tokenizer.encode_to_array(text, add_special_tokens=False)

    if kind == "sentencepiece":
        return {"kitoken": ("kitoken", kitoken("from_sentencepiece_file"))}
    if kind == "tokenizer.json":
        return {
            "kitoken": ("kitoken", kitoken("from_tokenizers_file")),
            "tokie": ("tokie", lambda module: ids_of(module.Tokenizer.from_json(path))),
            "splintr-rs": ("splintr", lambda module: module.from_json(path).encode_ordinary),
            "iree-tokenizer": ("iree.tokenizer", iree),
        }
    return {
        "bpe-openai": ("bpe_openai", lambda module: module.get_encoding("cl100k_base").encode_ordinary),
        "rs-bpe": ("rs_bpe", lambda module: module.openai.cl100k_base().encode),
        "quicktok-v1": ("quicktok", lambda module: module.get_encoding("cl100k_base").encode_ordinary),
    }


def measure(name: str, load: Load, texts: Sequence[str], expected: list[Any] | None) -> dict[str, Any]:
    """Rates of one engine, its ids, and how many texts get the ids `expected` (None: it is the library, which has no
    memory)."""
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
    told = ", ".join(f"{key} {row[key]['median']:6.2f}" for key in rates)
    print(f"  {name:16} {told} M tokens/s, equal {equal} of {len(texts)}", flush=True)
    return row | {"tokens": tokens, "equal": equal, "texts": len(texts), "ids": found}


def measure_kind(kind: str, tokenizer: str, texts: Sequence[str]) -> dict[str, Any]:
    """All engines of one kind of tokenizer; the first is the tokenizer's own library."""
    print(kind)
    loaded = encoders.load_encoder(tokenizer)
    library = encoders.load_encoder(tokenizer, fast=False)
    own = measure(library.engine, lambda: library.reference, texts, None)
    expected = own.pop("ids")
    rows = {library.engine: own}
    if loaded.encode is not loaded.reference:
        rows[loaded.engine] = measure(loaded.engine, lambda: encoders.load_encoder(tokenizer).encode, texts, expected)
    for name, (module, load) in others(kind, tokenizer).items():
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue
        try:
            package = importlib.import_module(module)
            rows[name] = measure(name, functools.partial(one_by_one, load, package), texts, expected)
        except Exception as error:  # a package that does not know the tokenizer says so in its own way
            rows[name] = {"error": str(error)[:200]}
            print(f"  {name:16} {error}")
    for row in rows.values():
        row.pop("ids", None)
    rates = {name: row["first"]["median"] for name, row in rows.items() if row.get("equal") == len(texts)}
    fastest = max(rates, key=lambda name: rates[name])
    return {"vocab_size": loaded.vocab_size, "shipped": loaded.engine, "fastest_first": fastest, "engines": rows}


def one_by_one(load: Callable[[Any], Ids], package: Any) -> encoders.Encode:
    """An engine that takes one text, for many."""
    encode = load(package)
    return lambda texts: [encode(text) for text in texts]


def train_tokenizer_json(texts: Sequence[str], path: Path) -> None:
    """A byte-level BPE like Llama 3's."""
    package: Any = importlib.import_module("tokenizers")
    before = package.pre_tokenizers
    model = package.Tokenizer(package.models.BPE())
    split = before.Split(package.Regex(LLAMA3_CUT), "isolated")
    model.pre_tokenizer = before.Sequence([split, before.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = package.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=before.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    model.save(str(path))


def cl100k(tiktoken: Any) -> Any:
    """tiktoken's cl100k_base, without the download."""
    file = Path(importlib.import_module("bpe_openai").__file__ or "").parent / "data" / "cl100k_base.tiktoken.gz"
    lines = (line.split() for line in gzip.decompress(file.read_bytes()).splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("cl100k_base", pat_str=CL100K_CUT, mergeable_ranks=ranks, special_tokens={})


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
    """The processor's own name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input", action="append", required=True)
    parser.add_argument("--sentencepiece", help="a model; default: one trained on the text")
    parser.add_argument("--megabytes", type=float, default=40, help="of text, every n-th file (default 40)")
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
        results["sentencepiece"] = measure_kind("sentencepiece", model, texts)
        results["sentencepiece"]["pipeline"] = pipeline(model, texts, folder)
        if importlib.util.find_spec("tokenizers"):
            path = folder / "tokenizer.json"
            train_tokenizer_json(texts, path)
            results["tokenizer.json"] = measure_kind("tokenizer.json", str(path), texts)
            results["tokenizer.json"]["pipeline"] = pipeline(str(path), texts, folder)
        if importlib.util.find_spec("tiktoken") and importlib.util.find_spec("bpe_openai"):
            tiktoken: Any = importlib.import_module("tiktoken")
            encoding = cl100k(tiktoken)
            tiktoken.get_encoding = lambda _name: encoding
            results["tiktoken"] = measure_kind("tiktoken", "tiktoken:cl100k_base", texts)
            results["tiktoken"]["pipeline"] = pipeline("tiktoken:cl100k_base", texts, folder)
    for kind, result in results.items():
        rate = result["pipeline"]["median"]
        print(f"{kind}: fastest at first {result['fastest_first']}; from JSON lines to a corpus {rate:.2f} M tokens/s")

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
