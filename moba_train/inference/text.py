"""Generation from text to text: tokenizer, generation, detokenizer."""

from collections.abc import Iterator

from moba_train.data.tokenizer import TextTokenizer
from moba_train.errors import UserError
from moba_train.inference.cache import Decode
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
    decode: Decode,
) -> Iterator[str]:
    """Yield the prompt, then the text that continues it as its tokens are sampled.

    The arguments are those of `generate`. Raises UserError for values out of range.
    """
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
            decode=decode,
        ):
            # Decoded from the start each time: a token alone may be part of a character, or lose its leading space.
            tokens.append(token)
            text = tokenizer.decode(tokens)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
    except ValueError as error:
        raise UserError(str(error)) from error
