"""Runs an exported model with its kernels where `import moba_train` fails: `python with_kernels.py DEVICE DTYPE`.

In the working folder: tokens.pt, and the export in `out`. To answers.pt go its logits, the number of layers in which
kernels attended, and its logits without kernels.
"""

import sys
from typing import Any

import torch


@torch.no_grad()
def main(device: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.load("tokens.pt")[None].to(device)
    options = {"trust_remote_code": True, "dtype": getattr(torch, dtype)}
    model: Any = AutoModelForCausalLM.from_pretrained("out", **options).eval().to(device)
    attentions = [layer.self_attn for layer in model.model["layers"]]
    attend = attentions[0].kernels
    found = []

    def counted(*arguments: Any) -> Any:
        found.append(attend(*arguments))
        return found[-1]

    answers = []
    for kernels in (counted, None):
        for attention in attentions:
            assert attention.kernels in (attend, counted)
            attention.kernels = kernels
        answers.append(model(tokens).logits[0].float().cpu())
    said, plain = answers
    torch.save((said, sum(one is not None for one in found), plain), "answers.pt")


if __name__ == "__main__":
    sys.modules["moba_train"] = None  # type: ignore[assignment]  # so that importing it fails
    main(*sys.argv[1:])
