"""Model card of an export: what the checkpoint and its run folder say of training, attention and evaluations."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from moba_train import __version__
from moba_train.attention.kind import AttentionKind
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.recipe import run_folder
from moba_train.checkpoint.retention import Evaluated
from moba_train.errors import UserError
from moba_train.foreign_files import folder_roots, read_foreign_json
from moba_train.tools.convert.hf_export import full_entry, published_entry
from moba_train.tools.saved_recipe import SavedRun, saved_training, trained_stages

CARD = "README.md"
_MOST_ROWS = 200
"""Rows of a table."""
_ADAPTERS_USE = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)
```

This folder has the trained adapters alone. BASE is the model that training began with; peft runs both with that model's
attention, not with the one above."""


def model_card(
    saved: SavedRun,
    kinds: Sequence[AttentionKind],
    dtype: str,
    with_code: bool,
    needs_code: bool,
    elsewhere: Sequence[Mapping[str, Any]],
) -> str:
    """README.md of an export of `saved` in `dtype`, whose layers attend by `kinds`.

    needs_code: no program runs it without its code, which is ours if `with_code`
    elsewhere: attention of each layer in programs that know its architecture alone, as `Family.attention` returns it
    """
    return _card(saved, kinds, "transformers", dtype, _use(kinds, with_code, needs_code, elsewhere), with_code)


def adapters_card(saved: SavedRun, kinds: Sequence[AttentionKind]) -> str:
    """README.md of the adapters of `saved` in a folder for peft, whose layers attended by `kinds`."""
    return _card(saved, kinds, "peft", "float32", _ADAPTERS_USE.splitlines(), False)


def _card(
    saved: SavedRun, kinds: Sequence[AttentionKind], library: str, dtype: str, use: Iterable[str], with_code: bool
) -> str:
    head = f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [moba_train, long-context]\n---\n"
    sections = {
        "Training": _training(saved),
        "Attention": _attention(kinds),
        "Evaluations": _evaluations(saved),
        "Use": use,
        "Not tested": _not_tested(with_code),
    }
    text = "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items())
    return f"{head}\n# {_plain(saved.config.name)}\n\n{_summary(saved, dtype)}\n\n{text}\n"


def _summary(saved: SavedRun, dtype: str) -> str:
    model = saved.config.model
    training = saved_training(saved.path)
    return (
        f"A decoder of {saved.spec.counts.total:,} parameters: {model.layers} layers of width {model.hidden_size}, "
        f"{model.heads} query and {model.kv_heads} key/value heads of {model.head_width}, vocabulary "
        f"{model.vocab_size:,}. moba_train {__version__} exported it in {dtype} from step {training.step:,} of its "
        f"run; the longest sequences had {training.seq_len:,} tokens. A program wrote this card: complete it with the "
        "licence, the origin of the data and the intended use."
    )


def _training(saved: SavedRun) -> Iterator[str]:
    """A table of the stages up to the checkpoint's, with the tokens that each consumed, and the corpora."""
    training = saved_training(saved.path)
    if training.tokens is None:
        yield "The weights were imported from another program and not trained here."
        return
    if saved.config.init_from is not None:
        began = f"Training began with the weights of `{_plain(Path(saved.config.init_from).name)}`"
        yield f"{began}{', to which it added adapters' if saved.spec.adapters else ''}.\n"
    yield "| stage | length | tokens | learning rate | rope | data (share of the tokens) |"
    yield "|---|---|---|---|---|---|"
    for stage in trained_stages(saved.path):
        ended = stage.index < saved.stage.index
        tokens = (stage.end_token if ended else training.tokens) - stage.first_token
        total = sum(source.weight for source in stage.sources)
        data = ", ".join(f"{_plain(Path(one.path).name)} ({one.weight / total:.1%})" for one in stage.sources)
        rope = f"{stage.rope.kind}, theta {stage.rope.theta:g}"
        yield f"| {_plain(stage.name)} | {stage.seq_len:,} | {tokens:,} | {stage.lr:g} | {rope} | {data} |"
    yield f"\nIn all {training.tokens:,} tokens in {training.step:,} steps. Tokens that were read twice count twice."


def _attention(kinds: Sequence[AttentionKind]) -> Iterator[str]:
    yield "| layers | kind | options |"
    yield "|---|---|---|"
    for entry, group in groupby(range(len(kinds)), lambda layer: full_entry(kinds[layer])):
        layers = [*group]
        name = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        options = ", ".join(f"{key}: {json.dumps(value)}" for key, value in entry.items() if key != "kind")
        yield f"| {name} | {entry['kind']} | {_plain(options)} |"


def _evaluations(saved: SavedRun) -> Iterator[str]:
    """Every number that the run folder has of this checkpoint's step."""
    rows = [*_numbers(saved)]
    if not rows:
        yield "The run folder has no evaluation of this checkpoint."
        return
    yield "Loss in nats per token. No number is of an independent test set unless its name says so.\n"
    yield "| evaluated | attention | number | value |"
    yield "|---|---|---|---|"
    yield from (
        f"| {_plain(where)} | {_plain(own)} | {_plain(name)} | {value:.4g} |" for where, own, name, value in rows
    )


def _numbers(saved: SavedRun) -> Iterator[tuple[str, str, str, float]]:
    """(where, attention, name, value) of numbers of the checkpoint's step."""
    meta = read_meta(saved.path)
    for name, value in (Evaluated.read(saved.path.parent).numbers(meta) or {}).items():
        yield "in training", "own", name, value
    folder = run_folder(saved.path)
    step = saved_training(saved.path).step
    for path in sorted((folder / "evaluations").glob("*.json")):
        # A file that cannot be read is one of another program, or half written: the card has what there is.
        with suppress(OSError, UserError, TypeError, KeyError, ValueError, AttributeError):
            content: dict[str, Any] = read_foreign_json(path, roots=folder_roots(folder))
            if content["step"] == step:
                rows = [(str(name), float(value)) for name, value in content["numbers"].items()]
                yield from ((path.name, str(content["attention"]), *row) for row in rows[:_MOST_ROWS])


def _use(
    kinds: Sequence[AttentionKind], with_code: bool, needs_code: bool, elsewhere: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    arguments = "FOLDER, trust_remote_code=True" if with_code or needs_code else "FOLDER"
    yield "```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f"model = AutoModelForCausalLM.from_pretrained({arguments})"
    yield f"tokenizer = AutoTokenizer.from_pretrained({arguments})"
    yield 'inputs = tokenizer("A prompt", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"
    yield "```\n"
    if with_code:
        yield (
            "Prompts are read with the attention above. New tokens attend to every token before them, except in layers "
            'with windows or states; with `moba_decode="own"` they attend as their layer does, unless it is `seer`. '
            "The code needs PyTorch and transformers 5. "
            + (
                "Without `trust_remote_code` transformers refuses the model."
                if needs_code
                else "Without `trust_remote_code` the model is an ordinary one with full attention."
            )
            + " The kernels in `kernels/` read prompts in 16 bits on NVIDIA GPUs; without them plain PyTorch does."
        )
    elif [*elsewhere] == [published_entry(kind) for kind in kinds]:
        yield "Programs that know this architecture run it with the attention above." + (
            " transformers fetches its code from the repository that `auto_map` in config.json names."
            if needs_code
            else ""
        )
    else:
        names = sorted({entry.get("kind", "full") for entry in elsewhere})
        yield (
            f"This is an ordinary model, which any program runs with {' and '.join(names)} attention in "
            f"{'all' if len(names) == 1 else 'its'} layers. moba_train runs it with the attention above."
        )


def _not_tested(with_code: bool) -> Iterator[str]:
    yield "- Everything that the evaluations above do not say, such as safety, bias and fairness."
    yield "- Sequences longer than those of training."
    yield "- Other element types than those the evaluations ran in, and quantised weights."
    if with_code:
        yield "- The code, in other programs than transformers (vLLM, llama.cpp), and with torch.compile."
    else:
        yield "- Full attention in layers that were trained with another one, unless the evaluations name it."


def _plain(text: str) -> str:
    """The text in one table cell."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())
