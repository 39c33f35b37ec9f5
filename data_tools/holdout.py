"""Holdout: which documents go to OUTPUT-valid. The choice depends only on a document's content."""

import hashlib
from collections.abc import Mapping


def splits(holdout: float) -> tuple[str, ...]:
    """Suffixes of the names of the corpora that this `holdout` makes."""
    return ("-train", "-valid") if holdout else ("",)


def choose_split(document: bytes, holdout: float) -> int:
    """Index, among the `splits`, of the corpus that a document belongs to; depends only on its content."""
    return int(holdout > 0 and hash_fraction(document, "holdout") < holdout)


def empty_split(documents: Mapping[str, int], holdout: float, name: str = "documents") -> str | None:
    """A sentence about the corpus that `holdout` has left empty, and what to give in its place; None if both have
    documents, and without a holdout.

    documents  number of documents by prefix, of the corpora of `splits`
    name       what the documents are called
    """
    if not holdout or all(documents.values()) or not any(documents.values()):
        return None
    empty, other = sorted(documents, key=lambda prefix: documents[prefix])
    total = documents[other]
    said = f"{empty} is empty, and training refuses an empty corpus: --holdout {holdout:g}"
    if total == 1:
        return (
            f"{said} cannot divide a single one of the {name}; give more of them, or make a corpus of other text for "
            "validation, without --holdout"
        )
    is_valid = empty == [*documents][1]
    share = holdout if is_valid else 1 - holdout
    wanted = max(3 / total, 2 * share)  # the corpus stays empty with a probability of exp(-3), 5 %, at most
    example = f" such as {wanted if is_valid else 1 - wanted:.2g}," if wanted <= 0.5 else ""
    return (
        f"{said} has put all {total:,} {name} into {other}; delete "
        f"{' and '.join(f'{prefix}.idx' for prefix in documents)}, and give a {'larger' if is_valid else 'smaller'} "
        f"--holdout,{example} or more {name}"
    )


def hash_fraction(document: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends only on the document's content and on `purpose`."""
    digest = hashlib.blake2b(document, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64
