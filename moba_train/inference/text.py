"""Text in, text out."""

from collections.abc import Iterator

from moba_train.data.tokenizer import TextTokenizer
from moba_train.errors import UserError
from moba_train.inference.generate import generate
from moba_train.model.transformer import Transformer


def generate_text(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    decode: str,
) -> Iterator[str]:
    """Yield the prompt, then its continuation piece by piece.

    `decode` is the attention of new tokens: "full", or "moba" for the layers' own. Raises UserError for values out of
    range.
    """
    if decode not in ("full", "moba"):
        raise UserError(f"--decode: {decode!r} given, allowed: full, moba")
    tokens = tokenizer.encode(prompt)
    yield prompt
    try:
        shown = tokenizer.decode(tokens)
        for token in generate(
            model,
            tokens,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token=tokenizer.eos_id,
            sparse_decode=decode == "moba",
        ):
            # Decoded from the start each time: a token alone may be part of a character, or lose its leading space.
            tokens.append(token)
            text = tokenizer.decode(tokens)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
    except ValueError as error:
        raise UserError(str(error)) from error
