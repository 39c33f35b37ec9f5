"""What identifies the content of a corpus, wherever it is stored."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of one corpus and its loss mask, in hexadecimal. Checkpoints store them."""

    index: str
    """SHA-256 of PREFIX.idx and the size of PREFIX.bin: the lengths and order of the documents."""
    tokens: str
    """SHA-256 of sampled blocks of PREFIX.bin."""
    bin_sha256: str | None = None
    """SHA-256 of all of PREFIX.bin, where the sidecar has it."""
    mask: "Fingerprint | None" = None
    """Fingerprint of the loss mask, if there is one."""

    @property
    def name(self) -> str:
        """A name for the corpus' tokens: equal for every copy, with or without its sidecar and mask."""
        return hashlib.sha256(f"{self.index}{self.tokens}".encode()).hexdigest()[:32]

    def difference(self, saved: "Fingerprint | str") -> str | None:
        """What differs from a fingerprint that a checkpoint has, in words; None: nothing.

        A string was saved by a version that knew the index, and whether there was a mask, but no tokens.
        """
        if isinstance(saved, str):
            now = self.index if self.mask is None else f"{self.index}+loss"
            return None if now == saved else "other document lengths, or a loss mask was added or removed"
        if self.index != saved.index:
            return "other document lengths"
        both_complete = self.bin_sha256 is not None and saved.bin_sha256 is not None
        if self.tokens != saved.tokens or (both_complete and self.bin_sha256 != saved.bin_sha256):
            return "other tokens in documents of the same lengths"
        if self.mask is None or saved.mask is None:
            return None if self.mask is saved.mask else "a loss mask was added or removed"
        return "another loss mask" if self.mask.difference(saved.mask) else None
