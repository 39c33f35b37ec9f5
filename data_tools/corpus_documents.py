"""Long documents made of the files of a source: neighbours in the tree of folders stay together."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class FilePart(NamedTuple):
    """Tokens [start, stop) of a file."""

    file: int
    start: int
    stop: int


Document = list[FilePart]


def group_files(paths: Sequence[str], lengths: Sequence[int], minimum: int, maximum: int) -> tuple[list[Document], int]:
    """Documents of `minimum` to `maximum` tokens made of files with these paths and lengths in tokens, in the order of
    their paths, and the number of tokens that are left out.

    A folder that fits is one document, with all that is below it. Of a larger one, neighbours are joined until they
    have `minimum` tokens; a file of more than `maximum` is cut into equal parts. What is too short by itself and has no
    neighbour with room for it is left out.
    """
    keys = {file: _tree_order(path) for file, path in enumerate(paths)}
    groups = _group(sorted(keys, key=keys.__getitem__), keys, 0, lengths, minimum, maximum)
    documents: list[Document] = []
    left_out = 0
    for group in groups:
        total = sum(lengths[file] for file in group)
        if total < minimum:
            left_out += total
        elif total <= maximum:
            documents.append([FilePart(file, 0, lengths[file]) for file in group])
        else:
            documents += [[part] for file in group for part in _cut(file, lengths[file], maximum)]
    return documents, left_out


TreeKey = tuple[tuple[bool, str], ...]


def _tree_order(path: str) -> TreeKey:
    """Orders the files of a folder before its folders, each by name."""
    *folders, name = path.split("/")
    return (*((True, folder) for folder in folders), (False, name))


def _group(
    files: list[int], keys: dict[int, TreeKey], depth: int, lengths: Sequence[int], minimum: int, maximum: int
) -> list[list[int]]:
    """Groups of `files`, which lie in one folder of this depth, in their order."""
    if len(files) == 1 or sum(lengths[file] for file in files) <= maximum:
        return [files] if files else []
    groups: list[list[int]] = []
    size = 0
    for _, members in itertools.groupby(files, key=lambda file: keys[file][depth]):
        for group in _group(list(members), keys, depth + 1, lengths, minimum, maximum):
            added = sum(lengths[file] for file in group)
            if groups and min(size, added) < minimum and size + added <= maximum:
                groups[-1] += group
                size += added
            else:
                groups.append(group)
                size = added
    return groups


def _cut(file: int, length: int, maximum: int) -> Iterator[FilePart]:
    """Equal parts of a file, up to a token, of at most `maximum` tokens."""
    parts = -(-length // maximum)
    for index in range(parts):
        yield FilePart(file, length * index // parts, length * (index + 1) // parts)
