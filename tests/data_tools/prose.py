"""Text to tokenize in the tests."""

import random

TEXT = "the quick brown fox jumps over lazy dogs while reading long documents about sparse attention"


def prose(seed: int, characters: int) -> str:
    """Deterministic text of about this many characters, in lines."""
    draw = random.Random(seed)
    lines = []
    while characters > 0:
        lines.append(" ".join(draw.choices(TEXT.split(), k=9)))
        characters -= len(lines[-1]) + 1
    return "\n".join(lines) + "\n"
