"""Holdout: which documents go to OUTPUT-valid. The choice depends only on a document's content."""

import hashlib


def splits(holdout: float) -> tuple[str, ...]:
    """Suffixes of the names of the corpora that this `holdout` makes."""
    return ("-train", "-valid") if holdout else ("",)


def choose_split(document: bytes, holdout: float) -> int:
    """Index, among the `splits`, of the corpus that a document belongs to; depends only on its content."""
    return int(holdout > 0 and hash_fraction(document, "holdout") < holdout)


def hash_fraction(document: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends only on the document's content and on `purpose`."""
    digest = hashlib.blake2b(document, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64
