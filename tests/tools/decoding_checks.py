"""A check that every attention kind must pass: it decodes what it was trained to compute."""

from typing import Any

import torch

from moba_train.attention.layout import packed_layout
from moba_train.tools.inference.cache import CachedAttention, CachePlan, Decode
from tests.attention.helpers import labelled
from tests.attention.kind_checks import small_model


@torch.no_grad()
def assert_decodes_like_training(
    name: str, options: dict[str, Any], *, prompts: tuple[int, ...] = (13, 5), steps: int = 9, decode: Decode = "own"
) -> None:
    """Logits of prompts read in parts and of tokens decoded in a batch are those of one pass over each text."""
    model = small_model(name, options)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 50, (prompt + steps,), generator=generator) for prompt in prompts]
    want = [model(text, torch.arange(len(text)), packed_layout([len(text)])) for text in texts]
    plan = CachePlan([len(text) for text in texts], torch.device("cpu"))
    model.set_engines([CachedAttention(plan, decode, kind) for kind in model.attention_kinds()])
    for sequence, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        cut = prompt // 2
        for part in (slice(0, cut), slice(cut, prompt)):
            plan.read(sequence, part.stop - part.start)
            got = model(text[part], torch.arange(part.start, part.stop), plan.layout)
            torch.testing.assert_close(got, want[sequence][part], rtol=0, atol=1e-10)
    for step in range(steps):
        plan.decode(range(len(texts)))
        at = [prompt + step for prompt in prompts]
        tokens = torch.stack([text[place] for text, place in zip(texts, at, strict=True)])
        got = model(tokens, torch.tensor(at), plan.layout)
        expected = torch.stack([logits[place] for logits, place in zip(want, at, strict=True)])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10, msg=labelled(f"step {step}"))
