"""Whether RULER's tasks can make samples of a length: some of lm-eval's generators never end, not even at Ctrl-C, where
their smallest sample is too long."""

from collections.abc import Iterator, Sequence
from typing import Any

from moba_train.errors import UserError

SHORTEST = 1024
"""Shortest samples of RULER's tasks, in tokens."""
_VT_EXAMPLE = 500
"""Tokens that the solved example before a variable-tracking task may have at most."""
_SPARE = 1.1
"""Samples of equally many words differ in length by a few percent."""
_GROUPS = ("ruler", "longcxt")
"""Groups and tags that contain the tasks."""


def check_sample_lengths(names: Sequence[str], tokenizer: Any, lengths: Sequence[int]) -> None:
    """Raises UserError when a task among `names` cannot make samples of one of these `lengths`."""
    checks = {"ruler_vt": _variable_tracking, "ruler_cwe": _common_words}
    for task, needed in checks.items():
        if task not in names and not any(group in names for group in _GROUPS):
            continue
        for length in lengths:
            for what, tokens, room in needed(tokenizer, length):
                if tokens > room:
                    raise UserError(
                        f"task {task}: {what} has {tokens} tokens with this tokenizer, and {room} are possible in "
                        f"samples of {length}; give other --lengths, or leave the task out"
                    )


def _variable_tracking(tokenizer: Any, length: int) -> Iterator[tuple[str, int, int]]:
    """What is measured, its tokens, and the room: the smallest solved example, and the smallest sample with it."""
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    example = _tokens(tokenizer, generate_input_output(5, 1, 4, is_icl=True)[0]) + 30
    yield "its solved example", example, _VT_EXAMPLE
    tokens = example + _tokens(tokenizer, generate_input_output(10, 1, 4)[0]) + 30
    yield "its smallest sample", tokens, length


def _common_words(tokenizer: Any, length: int) -> Iterator[tuple[str, int, int]]:
    """What is measured, its tokens, and the room: the smallest sample with its solved example."""
    from lm_eval.tasks.ruler.cwe_utils import generate_input_output

    example, text, answers = generate_input_output(10, length)
    tokens = _tokens(tokenizer, " ".join([example, text, *answers])) + 120
    yield "its smallest sample", tokens, length


def _tokens(tokenizer: Any, text: str) -> int:
    return int(_SPARE * len(tokenizer(text, verbose=False).input_ids))
