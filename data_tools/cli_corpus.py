"""`moba-data corpus` and `moba-data excerpt`: corpora of real long documents. Parses and prints; see cli.py."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moba_train.errors import DataError
from moba_train.tools.cli_options import parse_budget, parse_length, table_console


def corpus(
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write")],
    sources: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Sources to read; default: all that are found")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A further folder of text; can be repeated")
    ] = None,
    root: Annotated[
        Path, typer.Option(help="Folder that stands for /, such as one that packages were unpacked into")
    ] = Path("/"),
    vocab_size: Annotated[int, typer.Option(min=300, help="Token ids of the tokenizer")] = 16384,
    holdout: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of the text of each source for validation, in whole folders")
    ] = 0.02,
    min_tokens: Annotated[
        int, typer.Option(parser=parse_length, metavar="TOKENS", help="Shortest document of real text")
    ] = 32768,
    max_tokens: Annotated[
        int, typer.Option(parser=parse_length, metavar="TOKENS", help="Longest document of real text")
    ] = 524288,
    recall_share: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of synthetic recall documents in the training tokens")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Random seed of the recall documents")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per CPU")] = None,
) -> None:
    """Build a corpus of real long documents from packages that are installed. After an interruption, the same command
    continues where it stopped."""
    from data_tools.build_corpus import CorpusOptions, build_corpus
    from data_tools.corpus_sources import find_sources

    if max_tokens < 2 * min_tokens:
        raise DataError(f"--max-tokens: given {max_tokens}; allowed: at least twice --min-tokens, {2 * min_tokens}")
    names = None if sources is None else [name.strip() for name in sources.split(",")]
    found, missing = find_sources(root, names, _folders(source or []))
    for name, install in missing.items():
        typer.echo(f"{name} is not installed below {root}; to read it too: {install}", err=True)
    for read in found:
        typer.echo(f"{read.name}: {read.place}{f', version {read.version}' if read.version else ''}")
    options = CorpusOptions(vocab_size, holdout, min_tokens, max_tokens, recall_share, seed)
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    _print_manifest(build_corpus(found, output, options, workers or cpus), output)


def excerpt(
    folder: Annotated[Path, typer.Argument(metavar="CORPUS", help="Folder that `moba-data corpus` wrote")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write")],
    tokens: Annotated[
        int, typer.Option(parser=parse_budget, metavar="TOKENS", help="Training tokens to take, at most")
    ] = 60_000_000,
    valid_tokens: Annotated[
        int, typer.Option(parser=parse_budget, metavar="TOKENS", help="Tokens of each other corpus to take, at most")
    ] = 2_000_000,
) -> None:
    """Take some documents of a corpus, chosen by a hash, for a machine that the whole corpus is too large for."""
    from data_tools.corpus_manifest import take_excerpt

    _print_manifest(take_excerpt(folder, output, tokens, valid_tokens), output)


def _folders(given: list[str]) -> dict[str, str]:
    folders = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise DataError(f"--source {text}: allowed: NAME=FOLDER, such as notes=/home/me/notes")
        if name in folders:
            raise DataError(f"--source {name} is given twice")
        folders[name] = folder
    return folders


def _print_manifest(manifest: dict[str, Any], output: str) -> None:
    from data_tools.corpus_manifest import manifest_tables

    console = table_console()
    for table in manifest_tables(manifest):
        console.print(table)
    typer.echo(f"{output}: corpus {manifest['id']}")
