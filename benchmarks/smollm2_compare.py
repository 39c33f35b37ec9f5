"""Compares our model with `transformers` on one Hugging Face folder and real text, in float32.

    python -m benchmarks.smollm2_compare runs/smollm2/hf --corpus runs/smollm2/data/valid --output compare.json

It compares the model's own attention, and MoBA where the folder has the code of `convert moba-to-hf --with-code`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.record import save
from moba_train.attention.layout import packed_layout
from moba_train.data.indexed import IndexedDataset
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer
from moba_train.tools.hf.config import parse_layer, read_family, read_model_config
from moba_train.tools.hf.weights import load_hf_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", required=True, help="corpus prefix; the first document long enough is read")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    corpus = IndexedDataset(given.corpus)
    document = next(number for number, length in enumerate(corpus.document_lengths) if length > given.tokens)
    tokens = torch.from_numpy(corpus.document(document, 0, given.tokens + 1).astype("int64"))
    results = compare(given.folder, tokens.to("cuda" if torch.cuda.is_available() else "cpu"))
    for name, row in results.items():
        print(f"{name:<5} " + ", ".join(f"{key} {value:.7g}" for key, value in row.items()), flush=True)
    save(given.output, {"folder": str(given.folder), "tokens": given.tokens, "document": document}, results)


@torch.no_grad()
def compare(folder: Path, tokens: torch.Tensor) -> dict[str, dict[str, float]]:
    """Losses in nats per token and the largest difference of a logit, by attention."""
    from transformers import AutoModelForCausalLM

    family, config = read_family(folder)
    ours = Transformer(read_model_config(folder)).to(tokens.device).eval()
    load_hf_weights(ours, folder)
    length = len(tokens) - 1
    results = {}
    for name, with_code in {"full": False, "moba": True}.items():
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=with_code, dtype=torch.float32)
        layers = [parse_layer(entry or {"kind": "full"}) for entry in family.attention(config)]
        if name == "moba":
            if "auto_map" not in config:
                continue
            layers = [parse_layer(entry) for entry in theirs.config.moba["layers"]]
        ours.set_attention(build_attention(layers, ours.config.head_width))
        positions = torch.arange(length, device=tokens.device)
        layout = packed_layout([length], tokens.device)
        mine = ours(tokens[:-1], positions, layout)
        expected = theirs.to(tokens.device).eval()(tokens[None, :-1]).logits[0]
        results[name] = {
            "ours": F.cross_entropy(mine, tokens[1:]).item(),
            "transformers": F.cross_entropy(expected, tokens[1:]).item(),
            "largest logit difference": (mine - expected).abs().max().item(),
            "largest logit": expected.abs().max().item(),
        }
    return results


if __name__ == "__main__":
    main()
