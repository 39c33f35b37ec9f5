"""Long documents whose end depends on their beginning, for miniatures of long-context training.

Real text alone is a weak test of long context: most of its tokens can be predicted from the few hundred before them. A
document here consists of sections with headings: passages of real text, verbatim repeats of earlier passages (by
number), notes that assign a random number to a random name, and questions about the document's notes. Repeats and
answers refer back uniformly over the document so far, so their distances grow with the context. `RECALL_WEIGHTS` adds
variables that are assigned numbers or one another, and what their values are.

With `questions`, a document becomes a conversation: the user gives the document and asks for one of its notes, then for
others. Only the assistant's answers, a few numbers after a long document, carry loss in fine-tuning. With `reads`, the
assistant reads the document itself, a part with each call of a tool, before it answers: an agent's trajectory.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_tools.documents import BadRecord, cut_shards, read_documents
from data_tools.outputs import check_output_file, writing_file
from moba_train.errors import DataError

PASSAGE = (300, 1500)
"""Minimum and maximum length of a passage, in characters."""
WEIGHTS = {"passage": 5, "repeat": 3, "note": 3, "question": 4}
"""Relative frequency of each section type."""
RECALL_WEIGHTS = WEIGHTS | {"variable": 3, "value": 3}
"""Weights for the recall documents of `moba-data corpus`, which also have chains of variables."""
_COLOURS = (
    "amber",
    "bronze",
    "copper",
    "crimson",
    "golden",
    "indigo",
    "ivory",
    "jade",
    "olive",
    "pearl",
    "ruby",
    "teal",
)
_ANIMALS = (
    "badger",
    "condor",
    "falcon",
    "gecko",
    "heron",
    "ibex",
    "jackal",
    "kestrel",
    "lynx",
    "marten",
    "otter",
    "stork",
)


def write_long_range(
    files: Sequence[str],
    output: str | Path,
    documents: int,
    characters: int,
    seed: int | str,
    questions: int = 0,
    weights: Mapping[str, int] = WEIGHTS,
    reads: int = 0,
) -> list[BadRecord]:
    """Write `documents` documents of at least `characters` characters as JSON lines, from the text of `files`, and
    return the records that could not be read. The output is a pure function of the arguments.

    questions: 0 for the document under `text` in each line; otherwise each line is a conversation in the format
        "messages", with this number of questions and answers about the document
    weights: relative frequency of each section type
    reads: calls by which the assistant reads the document of a conversation; 0: the user gives it

    Raises DataError when no text is long enough to take passages from, or `output` cannot be written.
    """
    check_output_file(output)
    texts = []
    bad = []
    for shard in cut_shards(files):
        for document in read_documents(shard, "text"):
            if isinstance(document, BadRecord):
                bad.append(document)
            elif len(text := document.decode()) >= PASSAGE[1]:
                texts.append(text)
    if not texts:
        raise DataError(f"no --input text has {PASSAGE[1]} characters to take passages from; give longer texts")
    with writing_file(output) as stream:
        for index in range(documents):
            draw = random.Random(f"{seed}/{index}")
            record = _record(texts, characters, questions, weights, draw, reads)
            stream.write((json.dumps(record) + "\n").encode())
    return bad


def _record(
    texts: Sequence[str],
    characters: int,
    questions: int,
    weights: Mapping[str, int],
    draw: random.Random,
    reads: int,
) -> dict[str, Any]:
    """One record; each of `texts` must have at least `PASSAGE[1]` characters."""
    notes: dict[str, int] = {}
    document = _document(_sections(texts, notes, questions > 0, weights, draw), characters)
    if not questions:
        return {"text": document}
    messages: list[dict[str, Any]] = []
    for name in draw.choices(list(notes), k=questions):
        messages.append({"role": "user", "content": _question(name)})
        messages.append({"role": "assistant", "content": str(notes[name])})
    if reads:
        return {"messages": [messages[0], *_reading(document, reads), *messages[1:]], "tools": [_TOOL]}
    messages[0]["content"] = f"{document}\n{messages[0]['content']}"
    return {"messages": messages}


_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a part of the document.",
        "parameters": {"type": "object", "properties": {"part": {"type": "integer"}}},
    },
}


def _reading(document: str, reads: int) -> Iterator[dict[str, Any]]:
    """Yield a call for each part of the document, and its result."""
    size = -(-len(document) // reads)
    for part in range(reads):
        yield {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": {"part": part}}}]}
        yield {"role": "tool", "content": document[part * size : (part + 1) * size]}


def _document(sections: Iterator[str], characters: int) -> str:
    taken = []
    length = 0
    while length < characters:
        taken.append(next(sections))
        length += len(taken[-1])
    return "".join(taken)


def _question(name: str) -> str:
    return f"what is the number of the {name}?"


def _sections(
    texts: Sequence[str],
    notes: dict[str, int],
    begin_with_note: bool,
    weights: Mapping[str, int],
    draw: random.Random,
) -> Iterator[str]:
    """Yield sections without end, and add each note to `notes`."""
    passages: list[str] = []
    variables: dict[str, int] = {}
    while True:
        section = "note" if begin_with_note and not notes else draw.choices(list(weights), list(weights.values()))[0]
        if section == "repeat" and passages:
            number = draw.randrange(len(passages))
            yield f"\n### passage {number} again\n{passages[number]}\n"
        elif section == "note":
            name = f"{draw.choice(_COLOURS)} {draw.choice(_ANIMALS)} {draw.randrange(100)}"
            if name not in notes:
                notes[name] = draw.randrange(10**6, 10**7)
                yield f"\n### note\nthe number of the {name} is {notes[name]}\n"
        elif section == "question" and notes:
            name = draw.choice(list(notes))
            yield f"\n### question\n{_question(name)} {notes[name]}\n"
        elif section == "variable":
            yield f"\n### variable\n{_assignment(variables, draw)}\n"
        elif section == "value" and variables:
            name = draw.choice(list(variables))
            yield f"\n### value of {name}\n{variables[name]}\n"
        elif section == "passage":
            text = draw.choice(texts)
            length = draw.randint(*PASSAGE)
            start = draw.randrange(len(text) - length + 1)
            passages.append(text[start : start + length])
            yield f"\n### passage {len(passages) - 1}\n{passages[-1]}\n"


def _assignment(variables: dict[str, int], draw: random.Random) -> str:
    """Line that assigns a number to a variable or, more often, the value of another one. A variable may be assigned to
    again."""
    name = f"x{draw.randrange(1000)}"
    if not variables or draw.random() < 1 / 3:
        variables[name] = draw.randrange(10**4, 10**5)
        return f"{name} = {variables[name]}"
    other = draw.choice(list(variables))
    variables[name] = variables[other]
    return f"{name} = {other}"
