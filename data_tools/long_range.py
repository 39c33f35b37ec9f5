"""Long documents in which what comes late depends on what came early, for miniatures of long-context training.

Real text alone is a weak test of it: most of its tokens can be told from the few hundred before them. A document here
is made of headed pieces: passages of real text, passages of the same document once more (word for word, named by their
number), notes that give a random number to a random name, and questions that ask for one of the document's notes.
Repeats and answers refer back uniformly over the document so far, so their distances are as long as the context is.

Asked for questions, a document becomes a conversation: the user gives it and asks for one of its notes, then for
others, and what the assistant answers, a few numbers after a long document, is all that fine-tuning puts loss on.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_tools.documents import BadRecord, cut_shards, read_documents
from moba_train.errors import DataError

PASSAGE = (300, 1500)
"""Characters of a passage, least and most."""
WEIGHTS = {"passage": 5, "repeat": 3, "note": 3, "question": 4}
"""How often each kind of piece comes, relative to the others."""
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
    seed: int,
    text_key: str = "text",
    questions: int = 0,
) -> list[BadRecord]:
    """Write `documents` documents of at least `characters` characters as JSON lines, from the text of `files`, and
    return the records that could not be read. The same arguments give the same file.

    questions  0: lines with the document under `text_key`; else conversations of so many questions and answers about
               the document, in the format "messages"

    Raises DataError when no text is long enough to take passages from.
    """
    texts, bad = [], []
    for shard in cut_shards(files):
        for document in read_documents(shard, text_key):
            if isinstance(document, BadRecord):
                bad.append(document)
            elif len(text := document.decode()) >= PASSAGE[1]:
                texts.append(text)
    if not texts:
        raise DataError(f"no --input text has {PASSAGE[1]} characters to take passages from; give longer texts")
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for index in range(documents):
            draw = random.Random(f"{seed}/{index}")
            stream.write(json.dumps(_record(texts, characters, questions, text_key, draw)) + "\n")
    temporary.replace(path)
    return bad


def _record(
    texts: Sequence[str], characters: int, questions: int, text_key: str, draw: random.Random
) -> dict[str, str | list[dict[str, str]]]:
    """One line; each of `texts` has at least `PASSAGE[1]` characters."""
    notes: dict[str, int] = {}
    document = _document(_pieces(texts, notes, questions > 0, draw), characters)
    if not questions:
        return {text_key: document}
    messages = []
    for name in draw.choices(list(notes), k=questions):
        messages.append({"role": "user", "content": _question(name)})
        messages.append({"role": "assistant", "content": str(notes[name])})
    messages[0]["content"] = f"{document}\n{messages[0]['content']}"
    return {"messages": messages}


def _document(pieces: Iterator[str], characters: int) -> str:
    taken, length = [], 0
    while length < characters:
        taken.append(next(pieces))
        length += len(taken[-1])
    return "".join(taken)


def _question(name: str) -> str:
    return f"what is the number of the {name}?"


def _pieces(texts: Sequence[str], notes: dict[str, int], begin_with_note: bool, draw: random.Random) -> Iterator[str]:
    """Pieces without end; the notes among them are put into `notes`."""
    passages: list[str] = []
    while True:
        kind = "note" if begin_with_note and not notes else draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "repeat" and passages:
            number = draw.randrange(len(passages))
            yield f"\n### passage {number} again\n{passages[number]}\n"
        elif kind == "note":
            name = f"{draw.choice(_COLOURS)} {draw.choice(_ANIMALS)} {draw.randrange(100)}"
            if name not in notes:
                notes[name] = draw.randrange(10**6, 10**7)
                yield f"\n### note\nthe number of the {name} is {notes[name]}\n"
        elif kind == "question" and notes:
            name = draw.choice(list(notes))
            yield f"\n### question\n{_question(name)} {notes[name]}\n"
        elif kind == "passage":
            text = draw.choice(texts)
            length = draw.randint(*PASSAGE)
            start = draw.randrange(len(text) - length + 1)
            passages.append(text[start : start + length])
            yield f"\n### passage {len(passages) - 1}\n{passages[-1]}\n"
