"""`moba-data`: from text to training corpora. Parses and prints; the other modules of this folder do the work.

Modules are imported when a command runs, so that `--help` is fast.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_tools import cli_corpus
from moba_train.tools.cli_options import command_group, parse_length, table_console

if TYPE_CHECKING:
    from moba_train.data.indexed import IndexedDataset

SHOWN_RECORDS = 20
"""Bad records that are printed; the others are only counted."""

app = command_group("From text to training corpora in Megatron's .bin/.idx format.")

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        help="A .jsonl, .parquet or .arrow file, any other file (one document), a folder of such files or of a Hugging "
        "Face data set, also at s3:// or gs://; also .gz, .zst",
    ),
]
TextKey = Annotated[str, typer.Option(help="Key (JSON lines) or column (parquet, arrow) that holds the text")]
Globs = Annotated[
    list[str] | None,
    typer.Option("--glob", help="Files to read from folders, as a pattern; default: common text and code suffixes"),
]
Split = Annotated[
    str | None,
    typer.Option(help="Split of a Hugging Face data set to read, such as train; needed if a folder has several"),
]
EncodingErrors = Annotated[
    Literal["strict", "replace"],
    typer.Option(help="Text that is not UTF-8: a bad record (strict), or read with U+FFFD in these places (replace)"),
]
Excludes = Annotated[
    list[str] | None,
    typer.Option("--exclude", help="Files and folders to leave out, as a pattern, e.g. site-packages"),
]


def _files(
    inputs: Sequence[str], globs: Sequence[str] | None, excludes: Sequence[str] | None, split: str | None
) -> list[str]:
    from data_tools.input_files import TEXT_GLOBS

    return _find_files(inputs, globs or TEXT_GLOBS, excludes or (), split)


def _find_files(
    inputs: Sequence[str],
    globs: Sequence[str],
    excludes: Sequence[str],
    split: str | None,
    option: str = "--input",
) -> list[str]:
    from data_tools.input_files import LeftOut, describe_suffixes, find_files
    from moba_train.foreign_files import ROOTS

    left_out = LeftOut()
    files = find_files(inputs, globs, excludes, left_out, split, option)
    for link in left_out.links[:SHOWN_RECORDS]:
        typer.echo(f"left out {link}: a link to {os.path.realpath(link)}", err=True)
    if count := len(left_out.links):
        typer.echo(
            f"{count} links left out, which lead out of the input folder; {ROOTS}=FOLDER allows a folder", err=True
        )
    if count := len(left_out.irregular):
        example = left_out.irregular[0]
        typer.echo(f"files left out as pipes, devices or broken links: {count:,}, such as {example}", err=True)
    if count := left_out.suffixes.total():
        suffixes = describe_suffixes(left_out.suffixes)
        typer.echo(f"files not read because no --glob matches them: {count:,} ({suffixes})", err=True)
    return files


def _print_bad(records: Sequence[object], list_file: str) -> None:
    """Print the records that were skipped, or the first of them; `list_file` has all."""
    for record in records[:SHOWN_RECORDS]:
        typer.echo(f"skipped {record}", err=True)
    if len(records) > SHOWN_RECORDS:
        typer.echo(f"... and {len(records) - SHOWN_RECORDS:,} more", err=True)
    if records:
        typer.echo(f"{len(records):,} bad records skipped, all listed in {list_file}", err=True)


def _warn_of_empty_split(corpora: "Mapping[str, IndexedDataset]", holdout: float, name: str) -> None:
    from data_tools.outputs import empty_split

    counts = {prefix: corpus.documents for prefix, corpus in corpora.items()}
    if problem := empty_split(counts, holdout, name):
        typer.echo(f"warning: {problem}", err=True)


def _print_filtered(report: dict[str, Any], output: str) -> None:
    """Print the counts of documents that repeat others, or share text with evaluations."""
    from data_tools.filter_documents import filter_file

    if found := report.get("duplicates"):
        counts = f"{found['identical']:,} identical and {found['near']:,} near duplicates"
        typer.echo(f"left out of {report['documents']:,} documents: {counts}")
    if found := report.get("contamination"):
        for file, counts in found["evaluations"].items():
            typer.echo(
                f"{file}: {counts['contaminated']:,} of {counts['records']:,} records share text with "
                f"{counts['documents']:,} documents; {counts['too_short']:,} are too short to check"
            )
        typer.echo(f"documents with text of evaluations: {found['documents']:,}, {found['outcome']}")
    typer.echo(f"examples: {filter_file(output)}")


@app.command()
def train_tokenizer(
    inputs: Inputs,
    output: Annotated[str, typer.Option("--output", "-o", help="Model file to write")],
    vocab_size: Annotated[int, typer.Option(min=2, help="Number of token ids")] = 32000,
    text_key: TextKey = "text",
    globs: Globs = None,
    excludes: Excludes = None,
    split: Split = None,
    encoding_errors: EncodingErrors = "strict",
) -> None:
    """Train a sentencepiece BPE tokenizer with byte fallback (unk 0, bos 1, eos 2, pad 3)."""
    from data_tools.outputs import list_skipped, skipped_file
    from data_tools.train_tokenizer import train_tokenizer as train

    bad = train(_files(inputs, globs, excludes, split), output, vocab_size, text_key, encoding_errors)
    list_skipped(output, bad)
    _print_bad(bad, skipped_file(output))
    typer.echo(f"{output}: {vocab_size} token ids")


@app.command()
def tokenize(
    inputs: Inputs,
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", "-t", help="A sentencepiece model, a tokenizer.json, or tiktoken:ENCODING"),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Corpus prefix: file names without .bin/.idx")],
    text_key: TextKey = "text",
    globs: Globs = None,
    excludes: Excludes = None,
    split: Split = None,
    append_eos: Annotated[bool, typer.Option(help="End every document with the end-of-document token")] = True,
    eos: Annotated[str | None, typer.Option(help="Token that ends documents; default: the tokenizer's own")] = None,
    bos: Annotated[str | None, typer.Option(help="Token that begins documents; default: none")] = None,
    holdout: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Fraction of the documents for OUTPUT-valid; the rest goes to OUTPUT-train"),
    ] = 0.0,
    on_error: Annotated[
        Literal["skip", "fail"], typer.Option(help="Unreadable records: skip them, or fail at the first")
    ] = "skip",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per CPU")] = None,
    max_document_mib: Annotated[
        int, typer.Option(min=1, help="Longest document or JSON line; longer ones are skipped")
    ] = 128,
    encoding_errors: EncodingErrors = "strict",
    duplicates: Annotated[
        float | None,
        typer.Option(
            metavar="SIMILARITY",
            help="Leave out documents that repeat an earlier one: 1 for identical texts, 0.5 to 0.95 also for near "
            "duplicates (Jaccard similarity of runs of 5 words); default: keep all",
        ),
    ] = None,
    evaluations: Annotated[
        list[str] | None,
        typer.Option(help="Files or folders of evaluations: report the documents that share 13 words with them"),
    ] = None,
    contaminated: Annotated[
        Literal["keep", "drop"], typer.Option(help="Documents that share text with --evaluations: keep or drop them")
    ] = "keep",
) -> None:
    """Tokenize text into a corpus. After an interruption, the same command continues where it stopped."""
    from data_tools.input_files import TEXT_GLOBS
    from data_tools.outputs import skipped_file
    from data_tools.parts import TokenizeOptions
    from data_tools.tokenize_corpus import tokenize_corpus
    from moba_train.errors import DataError

    if contaminated == "drop" and not evaluations:
        raise DataError("--contaminated drop: given without --evaluations, whose texts are looked for; give them also")
    options = TokenizeOptions(
        tokenizer,
        text_key,
        append_eos,
        holdout,
        on_error == "fail",
        eos,
        bos,
        max_document_mib << 20,
        encoding_errors,
        duplicates,
        tuple(_find_files(evaluations, TEXT_GLOBS, (), None, "--evaluations")) if evaluations else (),
        contaminated == "drop",
    )
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    result = tokenize_corpus(_files(inputs, globs, excludes, split), output, options, workers or cpus)
    if result.already_complete:
        typer.echo("already complete, nothing to do")
    else:
        typer.echo(f"engine: {result.engine}")
    if result.resumed_parts and not result.already_complete:
        typer.echo(f"resumed: {result.resumed_parts} of {result.parts} parts were finished already")
    _print_bad(result.bad, skipped_file(output))
    if result.empty:
        typer.echo(f"empty texts and files left out, which are no documents: {result.empty:,}", err=True)
    if result.filtered is not None:
        _print_filtered(result.filtered, output)
    for prefix, corpus in result.corpora.items():
        typer.echo(f"{prefix}: {corpus.documents:,} documents, {corpus.tokens:,} tokens")
    _warn_of_empty_split(result.corpora, holdout, "documents")


@app.command()
def long_range(
    inputs: Inputs,
    output: Annotated[str, typer.Option("--output", "-o", help=".jsonl file to write")],
    documents: Annotated[int, typer.Option(min=1, help="Number of documents")] = 1500,
    characters: Annotated[
        int, typer.Option(min=1, help="Minimum length of a document; a token is 2 to 4 characters")
    ] = 150_000,
    questions: Annotated[
        int,
        typer.Option(
            min=0,
            help="Questions per document, as conversations for `sft`; 0: plain documents",
        ),
    ] = 0,
    reads: Annotated[
        int, typer.Option(min=0, help="With --questions: tool calls by which the assistant reads the document")
    ] = 0,
    globs: Globs = None,
    excludes: Excludes = None,
) -> None:
    """Make long documents with repeated passages and questions about earlier notes, for miniature recipes."""
    from data_tools.long_range import write_long_range
    from data_tools.outputs import list_skipped, skipped_file
    from moba_train.errors import DataError

    files = _files(inputs, globs, excludes, None)
    if reads and not questions:
        raise DataError(f"--reads: given {reads} without --questions, which it is for; give --questions 1 or more")
    bad = write_long_range(files, output, documents, characters, 0, questions, reads=reads)
    list_skipped(output, bad)
    _print_bad(bad, skipped_file(output))
    what = f"conversations with {questions} questions about" if questions else "documents of at least"
    typer.echo(f"{output}: {documents} {what} {characters} characters")


@app.command()
def show(
    prefix: Annotated[str, typer.Argument(metavar="CORPUS", help="Corpus prefix: file names without .bin/.idx")],
    documents: Annotated[
        str | None,
        typer.Option(
            help="Documents to print, counted from 0: 0,5,10:12 (10:12 is 10 and 11); default: the first three"
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(parser=parse_length, metavar="TOKENS", help="Print this many tokens of each document at most"),
    ] = 1000,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "-t", help="Tokenizer that made the corpus; default: the one next to the corpus"),
    ] = None,
) -> None:
    """Print documents of a corpus as text, with the part that carries loss marked if there is a loss mask."""
    from data_tools.show import load_decoder, made_with, parse_documents, show_documents, tokenizer_of
    from moba_train.data.indexed import IndexedDataset

    corpus = IndexedDataset(prefix)
    wanted = range(min(3, corpus.documents)) if documents is None else parse_documents(documents, corpus.documents)
    chosen = tokenizer or tokenizer_of(corpus)
    decoder = load_decoder(chosen)
    if made_with(corpus, chosen) is False:
        typer.echo(f"warning: {chosen} did not make this corpus: the text may be wrong", err=True)
    marks = ("\x1b[1;32m", "\x1b[0m") if sys.stdout.isatty() else ("[[", "]]")
    for shown in show_documents(corpus, decoder, wanted, tokens, marks):
        with_loss = "" if shown.loss_tokens is None else f", {shown.loss_tokens:,} with loss"
        typer.echo(f"--- document {shown.number} of {corpus.documents:,}: {shown.tokens:,} tokens{with_loss} ---")
        typer.echo(shown.text)
        if shown.left_out:
            printed = shown.tokens - shown.left_out
            typer.echo(f"--- the first {printed:,} of {shown.tokens:,} tokens; --tokens prints more ---")


@app.command()
def stats(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Corpora")],
    plot: Annotated[str | None, typer.Option(help=".html file to draw the lengths into (needs plotly)")] = None,
) -> None:
    """Show the number of documents and tokens in each corpus, and the distribution of document lengths."""
    from data_tools.stats import draw_lengths, histogram_table, summary_table
    from moba_train.data.indexed import IndexedDataset

    corpora = [IndexedDataset(prefix) for prefix in prefixes]
    console = table_console()
    console.print(summary_table(corpora))
    for corpus in corpora:
        console.print(histogram_table(corpus))
    if plot is not None:
        draw_lengths(corpora, plot)
        typer.echo(f"drawn into {plot}")


@app.command()
def blend(
    recipe: Annotated[str, typer.Argument(help="A training recipe")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Keys to override")] = None,
) -> None:
    """Show what each stage of a recipe reads: tokens, share, repeats, padding and lengths of documents."""
    from data_tools.stats import blend_table, blend_warnings, preview, read_lengths_table
    from moba_train.config.load import load_config
    from moba_train.resolve.recipe import resolve

    config = load_config(recipe, overrides or [])
    run = resolve(config, check_files=True)
    console = table_console()
    console.print(blend_table(preview(run.samples, run.stages)))
    console.print(read_lengths_table(run.samples, run.stages))
    for warning in blend_warnings(run.samples, run.stages):
        typer.echo(f"warning: {warning}", err=True)


@app.command()
def verify(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Corpora")],
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Token ids must be below this; default: the vocabulary size stored with the corpus"),
    ] = None,
) -> None:
    """Check every byte of corpora."""
    from data_tools.show import verify_corpus

    for prefix in prefixes:
        corpus, limit = verify_corpus(prefix, vocab_size)
        checked = f"all ids below {limit}" if limit else "vocabulary size unknown, ids not checked; give --vocab-size"
        typer.echo(f"{prefix}: good, {corpus.documents:,} documents, {corpus.tokens:,} tokens, {checked}")


@app.command()
def sft(
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            help="A .jsonl, .json, .parquet or .arrow file of conversations, a folder of such files or of a Hugging "
            "Face data set, also at s3:// or gs://",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", "-t", help="A sentencepiece model, a tokenizer.json, or a folder with one"),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Corpus prefix: file names without .bin/.idx")],
    template: Annotated[
        str,
        typer.Option(help="Chat template: chatml, llama3, a Jinja file, or a model folder that has one"),
    ] = "chatml",
    split: Split = None,
    end_of_turn: Annotated[
        str | None,
        typer.Option(help="Text that ends a turn; default: that of the built-in template, or the folder's eos_token"),
    ] = None,
    holdout: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.99,
            help="Fraction of the conversations for OUTPUT-valid; the rest goes to OUTPUT-train",
        ),
    ] = 0.0,
    on_error: Annotated[
        Literal["skip", "fail"], typer.Option(help="Unusable records: skip them, or fail at the first")
    ] = "skip",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Longer conversations end with the last answer that fits; default: no limit"),
    ] = None,
    loss_turns: Annotated[
        Literal["all", "last"],
        typer.Option(help="Answers that carry loss: all, or those after the last message of a user"),
    ] = "all",
    thought_weight: Annotated[
        float, typer.Option(min=0, max=1, help="Factor on the loss of thoughts (reasoning_content); 0: no loss")
    ] = 1.0,
    template_kwargs: Annotated[
        str,
        typer.Option(help='Variables of the template as JSON, such as {"enable_thinking": false}; a record may differ'),
    ] = "{}",
) -> None:
    """Turn conversations (messages, prompt and completion, ShareGPT, alpaca, tokens) into a corpus with a loss mask."""
    from data_tools.conversations import template_variables
    from data_tools.outputs import skipped_file
    from data_tools.sft import SftOptions, make_sft_corpus
    from moba_train.tools.chat.load import load_chat_template

    files = _find_files(inputs, ("*.jsonl", "*.json", "*.parquet", "*.arrow"), (), split)
    chat_template = load_chat_template(template, end_of_turn)
    options = SftOptions(max_tokens, loss_turns, thought_weight, template_variables(template_kwargs))
    result = make_sft_corpus(files, output, tokenizer, chat_template, holdout, on_error == "fail", options)
    if result.already_complete:
        typer.echo("already complete, nothing to do")
    _print_bad(result.bad, skipped_file(output))
    for marker, tokens in result.split_markers.items():
        typer.echo(
            f"warning: {marker}, which the chat template writes, becomes {tokens} tokens of {tokenizer} instead of "
            "one; use the tokenizer of a model that was trained with this template, or another --template",
            err=True,
        )
    for warning in result.not_whole.warnings():
        typer.echo(f"warning: {warning}", err=True)
    for prefix, corpus in result.corpora.items():
        loss_tokens = result.loss_tokens[prefix]
        with_loss = f"{loss_tokens:,} with loss ({loss_tokens / max(corpus.tokens, 1):.2%})"
        longest = f"the longest {int(corpus.document_lengths.max(initial=0)):,}"
        typer.echo(f"{prefix}: {corpus.documents:,} conversations, {corpus.tokens:,} tokens, {with_loss}, {longest}")
    _warn_of_empty_split(result.corpora, holdout, "conversations")


app.command()(cli_corpus.corpus)
app.command()(cli_corpus.excerpt)
