"""`moba-train eval`, `lm-eval`, `profile-spans` and `generate`: the commands that use a trained model.

cli.py makes commands of these functions.
"""

import itertools
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from moba_train.tools.cli_options import Overrides, check_output_folder, parse_length

EvaluatedModel = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="a checkpoint, a run folder: its newest valid checkpoint, or a Hugging Face folder"
    ),
]
AttentionOption = Annotated[
    Literal["full", "own", "both"],
    typer.Option(
        help="own: the stage's attention or, if all its layers are full, the recipe's; full: full in all layers",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(metavar="CORPUS", help="tokenised corpus instead of data.validation; may be given several times"),
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="default: the recipe's; docs/how-to/evaluate.md lists the places")
]


def _lengths(text: str | None) -> tuple[int, ...]:
    """Lengths in `text`, separated by commas; none if it is not given."""
    return tuple(parse_length(length.strip()) for length in text.split(",")) if text else ()


def _on_ranks(gpus: int) -> None:
    """Begin the command again under torchrun, if it is not there and more than one rank is asked for."""
    if gpus > 1 and "RANK" not in os.environ:
        from moba_train.tools.launch.torchrun import torchrun_command

        os.execv(sys.executable, [*torchrun_command(gpus), "-m", "moba_train.tools.cli", *sys.argv[1:]])


def evaluate(
    checkpoint: EvaluatedModel,
    overrides: Overrides = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="evaluations to run, also those that the recipe does not have; default: the recipe's",
        ),
    ] = None,
    data: DataOption = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=parse_length, metavar="TOKENS", help="length of a sequence, e.g. 32K; default: the stage's"
        ),
    ] = None,
    attention: AttentionOption = "both",
    gpus: Annotated[int, typer.Option(min=1, help="ranks on this machine")] = 1,
    cp: Annotated[int | None, typer.Option(min=1, help="context-parallel ranks; default: the stage's")] = None,
    output: Annotated[Path | None, typer.Option(help="folder for another evaluation.json, with charts")] = None,
) -> None:
    """Evaluate on held-out text and other tasks, with own and full attention on the same weights.

    Results go to RUN/evaluations/."""
    check_output_folder(output)
    _on_ranks(gpus)
    from moba_train.tools.evaluate import evaluate_checkpoint
    from moba_train.tools.evaluated_recipe import EvaluationOptions, open_for_evaluation

    options = EvaluationOptions(
        attention=attention,
        tasks=None if tasks is None else tuple(name.strip() for name in tasks.split(",")),
        overrides=tuple(overrides or ()),
        data=tuple(data or ()),
        seq_len=seq_len,
        cp=cp,
        output=output,
    )
    evaluate_checkpoint(open_for_evaluation(checkpoint, options), options, typer.echo)


def lm_eval(
    checkpoint: EvaluatedModel,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help="tasks, groups or tags of lm-eval; * for any text")],
    overrides: Overrides = None,
    attention: AttentionOption = "own",
    decode: Annotated[
        Literal["full", "own"],
        typer.Option(
            help="attention of generated tokens: full (layers with windows or states: as trained), or each layer's "
            "own; prompts are read as --attention says",
        ),
    ] = "full",
    answer: Annotated[
        Literal["full", "own"],
        typer.Option(help="full: score answers once more with full attention behind a text that is read with own"),
    ] = "own",
    limit: Annotated[
        float | None, typer.Option(help="samples of each task; below 1: this share; default: all of them")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="examples before each question; default: the task's")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts that are continued together")] = 8,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=parse_length,
            metavar="TOKENS",
            help="longest text that is read, e.g. 32K; longer ones lose their beginning; default: the stage's length",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,...", help="lengths of RULER's samples, e.g. 4K,8K; default: --seq-len"),
    ] = None,
    include_path: Annotated[Path | None, typer.Option(metavar="FOLDER", help="folder with tasks of your own")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="put questions into the tokenizer's chat template")
    ] = False,
    tokenizer: TokenizerOption = None,
    output: Annotated[Path | None, typer.Option(help="folder for another evaluation.json")] = None,
) -> None:
    """Run tasks of the package lm-eval on one device, with own or full attention on the same weights.

    Results go to RUN/evaluations/."""
    from moba_train.tools.evaluated_recipe import open_to_generate
    from moba_train.tools.lm_eval import check_installed

    check_installed()
    from moba_train.tools.lm_eval.run import LmEvalOptions, evaluate_with_lm_eval

    check_output_folder(output)
    if limit is not None and limit <= 0:
        raise typer.BadParameter(f"--limit: given {limit}; allowed: above 0")
    options = LmEvalOptions(
        tasks=tuple(name.strip() for name in tasks.split(",")),
        attention=attention,
        decode=decode,
        answer=answer,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        seq_len=seq_len,
        lengths=_lengths(lengths),
        include_path=include_path,
        apply_chat_template=apply_chat_template,
        overrides=tuple(overrides or ()),
        output=output,
    )
    saved, roots = open_to_generate(checkpoint, tokenizer, options.overrides, seq_len)
    evaluate_with_lm_eval(saved, roots, options, typer.echo)


def profile_spans(
    checkpoint: EvaluatedModel,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="new piece of a recipe")] = Path(
        "moa-spans.yaml"
    ),
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="lengths of documents to measure on, e.g. 2K,4K,8K; default: a quarter, half and all of the stage's",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(help="share of full attention's pairs that the heads may attend to, at each length")
    ] = 0.5,
    data: DataOption = None,
    samples: Annotated[int, typer.Option(min=1, help="documents of each length")] = 8,
    block_size: Annotated[
        int, typer.Option(parser=parse_length, metavar="TOKENS", help="tokens per block, as attention.moa.block_size")
    ] = 64,
    sink_tokens: Annotated[int, typer.Option(min=0, help="as attention.moa.sink_tokens")] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(
            parser=parse_length,
            metavar="TOKENS",
            help="longest document that the spans are for, e.g. 128K; default: the longest of --lengths",
        ),
    ] = None,
) -> None:
    """Choose a span for each attention head (kind moa) by what masking its attention would cost, on one device.

    Writes a piece of a recipe."""
    from moba_train.tools.evaluated_recipe import EvaluationOptions, open_for_evaluation
    from moba_train.tools.profile_spans import ProfileOptions
    from moba_train.tools.profile_spans import profile_spans as profile

    options = ProfileOptions(output, _lengths(lengths), budget, samples, block_size, sink_tokens, max_length)
    saved = open_for_evaluation(checkpoint, EvaluationOptions(tasks=(), data=tuple(data or ())))
    profile(saved, options, typer.echo)


def generate(
    checkpoint: EvaluatedModel,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="text to continue; it is printed first")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file with the text to continue, exactly as it is; -: stdin")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="the prompt is a user's message, written by the chat template of training")
    ] = False,
    tokenizer: TokenizerOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1 << 24)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token")] = 0.8,
    top_p: Annotated[float, typer.Option(help="sample from the likeliest tokens that make up this probability")] = 0.95,
    seed: Annotated[int, typer.Option(min=-(1 << 31), max=(1 << 31) - 1, help="equal seeds give equal text")] = 0,
    decode: Annotated[
        Literal["full", "own"],
        typer.Option(
            help="attention of new tokens: full (layers with windows or states: as trained), or each layer's own",
        ),
    ] = "full",
    gpus: Annotated[int, typer.Option(min=1, help="ranks on this machine, which share the prompt")] = 1,
) -> None:
    """Continue a prompt. The prompt is read with each layer's own attention."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt TEXT or --prompt-file FILE")
    if prompt == "":
        raise typer.BadParameter("--prompt: given an empty text; allowed: at least one token")
    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"--prompt: not UTF-8 text, at character {error.start}") from None
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"--top-p: given {top_p:g}; allowed: above 0, at most 1")
    _on_ranks(gpus)
    from moba_train.parallel.world import broadcast, joined_world
    from moba_train.tools.chat.load import has_chat_template
    from moba_train.tools.evaluate import load_on_this_machine, ranks_of_prompt, training_of
    from moba_train.tools.evaluated_recipe import open_to_generate
    from moba_train.tools.generate import chat_prompt, generate_text, read_prompt
    from moba_train.tools.inference.corpus_marks import corpus_marks, ends_of_text
    from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer

    with joined_world() if "RANK" in os.environ else nullcontext() as world:
        is_main = world is None or world.is_main
        opened, roots = open_to_generate(checkpoint, tokenizer, tuple(overrides or ()))
        # Of a run that trains, ranks may have found different checkpoints; the first rank holds its own.
        saved = opened if world is None else broadcast(opened._replace(held=None))
        tokenizer_path = tokenizer or str(saved.config.data.tokenizer)
        tokenizer_roots = None if tokenizer else roots
        known = load_text_tokenizer(tokenizer_path, tokenizer_roots)
        marks = corpus_marks(saved, roots)
        if chat or marks.spelt_out(has_chat_template(tokenizer_path, tokenizer_roots)):
            known = ChatTokenizer(known)
        # On one rank: stdin cannot be read by several.
        given = read_prompt(prompt_file) if prompt_file is not None and is_main else prompt or ""
        given = given if world is None else broadcast(given)
        if chat:
            given = chat_prompt(given, marks.template, Path(tokenizer_path))
        text = generate_text(
            load_on_this_machine(saved),
            known,
            given,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            decode=decode,
            marks=marks,
            stop_tokens=ends_of_text(tokenizer_path, tokenizer_roots),
            trained_length=training_of(saved).seq_len,
            ranks=None if world is None else ranks_of_prompt(saved, world),
            say=lambda line: typer.echo(line, err=True) if is_main else None,
        )
        first = next(text, "")  # bad input is refused here, before anything is printed
        for addition in itertools.chain([prompt or "", first], text, ["\n"]):
            if is_main:
                typer.echo(addition, nl=False)
