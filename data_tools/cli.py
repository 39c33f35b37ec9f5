"""`moba-data`: from text to training corpora. Parses and prints; the work is done by the modules beside it.

Modules are imported when a command runs, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from moba_train.commands import command_group

SHOWN_RECORDS = 20


app = command_group("From text to training corpora in Megatron's .bin/.idx format.")

Inputs = Annotated[
    list[str],
    typer.Option("--input", "-i", help="A .jsonl or .parquet file, any other file (one document), or a folder of them"),
]
TextKey = Annotated[str, typer.Option(help="Where the text is in JSON lines and parquet files")]
Globs = Annotated[
    list[str] | None, typer.Option("--glob", help="Files to read from folders; default: common text and code suffixes")
]
Excludes = Annotated[
    list[str] | None, typer.Option("--exclude", help="Files and folders to leave out, e.g. site-packages")
]


def _files(inputs: Sequence[str], globs: Sequence[str] | None, excludes: Sequence[str] | None) -> list[str]:
    from data_tools.documents import TEXT_GLOBS, find_files

    return find_files(inputs, globs or TEXT_GLOBS, excludes or ())


def _print_bad(records: Sequence[object], all_in: str | None = None) -> None:
    for record in records[:SHOWN_RECORDS]:
        typer.echo(f"skipped {record}", err=True)
    if len(records) > SHOWN_RECORDS:
        typer.echo(f"... and {len(records) - SHOWN_RECORDS} more", err=True)
    if records:
        typer.echo(f"{len(records)} bad records skipped" + (f", all listed in {all_in}" if all_in else ""), err=True)


@app.command()
def train_tokenizer(
    inputs: Inputs,
    output: Annotated[str, typer.Option("--output", "-o", help="The model file to write")],
    vocab_size: Annotated[int, typer.Option(min=2, help="Number of token ids")] = 32000,
    text_key: TextKey = "text",
    globs: Globs = None,
    excludes: Excludes = None,
) -> None:
    """Train a sentencepiece BPE tokenizer with byte fallback (unk 0, bos 1, eos 2, pad 3)."""
    from data_tools.train_tokenizer import train_tokenizer as train

    _print_bad(train(_files(inputs, globs, excludes), output, vocab_size, text_key))
    typer.echo(f"{output}: {vocab_size} token ids")


@app.command()
def tokenize(
    inputs: Inputs,
    tokenizer: Annotated[str, typer.Option("--tokenizer", "-t", help="A sentencepiece model file")],
    output: Annotated[str, typer.Option("--output", "-o", help="Corpus prefix: file names without .bin/.idx")],
    text_key: TextKey = "text",
    globs: Globs = None,
    excludes: Excludes = None,
    append_eos: Annotated[bool, typer.Option(help="End every document with the tokenizer's eos")] = True,
    holdout: Annotated[
        float, typer.Option(min=0, max=0.99, help="Fraction of documents for OUTPUT-valid; the rest is OUTPUT-train")
    ] = 0.0,
    on_error: Annotated[Literal["skip", "fail"], typer.Option(help="What to do with records that cannot be read")] = (
        "skip"
    ),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per CPU")] = None,
) -> None:
    """Tokenize text into a corpus. Run it again after an interruption: it goes on where it stopped."""
    from data_tools.parts import TokenizeOptions
    from data_tools.tokenize_corpus import tokenize_corpus

    options = TokenizeOptions(tokenizer, text_key, append_eos, holdout, on_error == "fail")
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    result = tokenize_corpus(_files(inputs, globs, excludes), output, options, workers or cpus)
    if result.already_complete:
        typer.echo("already complete, nothing to do")
    elif result.resumed_parts:
        typer.echo(f"resumed: {result.resumed_parts} of {result.parts} parts were finished already")
    _print_bad(result.bad, f"{output}.skipped.txt")
    for prefix, corpus in result.corpora.items():
        typer.echo(f"{prefix}: {corpus.documents:,} documents, {corpus.tokens:,} tokens")


@app.command()
def long_range(
    inputs: Inputs,
    output: Annotated[str, typer.Option("--output", "-o", help="The .jsonl file to write")],
    documents: Annotated[int, typer.Option(min=1, help="How many documents")] = 1500,
    characters: Annotated[
        int, typer.Option(min=1, help="Length of a document; a token is 2 to 4 characters")
    ] = 150_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same documents")] = 0,
    text_key: TextKey = "text",
    globs: Globs = None,
    excludes: Excludes = None,
) -> None:
    """Make long documents with repeated passages and questions about earlier notes, for miniatures of long contexts."""
    from data_tools.long_range import write_long_range

    _print_bad(write_long_range(_files(inputs, globs, excludes), output, documents, characters, seed, text_key))
    typer.echo(f"{output}: {documents} documents of {characters} characters")


@app.command()
def stats(prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Corpora")]) -> None:
    """Show how many documents and tokens corpora have, and how long the documents are."""
    from rich.console import Console

    from data_tools.stats import histogram_table, summary_table
    from moba_train.data.indexed import IndexedDataset

    corpora = [IndexedDataset(prefix) for prefix in prefixes]
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(summary_table(corpora))
    for corpus in corpora:
        console.print(histogram_table(corpus))


@app.command()
def verify(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Corpora")],
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Token ids must be below this; default: what the corpus was made with")
    ] = None,
) -> None:
    """Check corpora from the first byte to the last."""
    from data_tools.verify import verify_corpus

    for prefix in prefixes:
        corpus, limit = verify_corpus(prefix, vocab_size)
        checked = f"all ids below {limit}" if limit else "vocabulary unknown, ids not checked; give --vocab-size"
        typer.echo(f"{prefix}: good, {corpus.documents:,} documents, {corpus.tokens:,} tokens, {checked}")
