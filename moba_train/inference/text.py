"""Text in, text out."""

from collections.abc import Iterator
from pathlib import Path

import torch

from moba_train.checkpoint.publish import find_checkpoint
from moba_train.data.tokenizer import load_text_tokenizer
from moba_train.errors import UserError
from moba_train.inference.generate import generate
from moba_train.inference.load import load_trained


def generate_text(
    path: Path, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int, decode: str
) -> Iterator[str]:
    """Yield the prompt, then its continuation piece by piece, from a checkpoint or a run folder's newest one.

    `decode` is the attention of new tokens: "full", or "moba" for the layers' own. Uses the GPU in bf16 where there is
    one. Raises UserError for a recipe without tokenizer or values out of range.
    """
    if decode not in ("full", "moba"):
        raise UserError(f"--decode: {decode!r} given, allowed: full, moba")
    checkpoint = find_checkpoint(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, config, _ = load_trained(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if config.data.tokenizer is None:
        raise UserError(f"{checkpoint}: its recipe names no data.tokenizer")
    tokenizer = load_text_tokenizer(config.data.tokenizer)
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
