"""Run by a Python that has transformers 4: writes the tiny models of hf_models.py, or reads exports of them.

python with_transformers_4.py write FOLDER    models of FOLDER/shapes.json and their logits, by family
python with_transformers_4.py read FOLDER     logits of each FOLDER/FAMILY/out, in FOLDER/logits.pt
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def as_4_takes_it(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the keys of transformers 5, as 4 takes it: the rotary embedding has no section, and of two types
    of layers the full ones alone are scaled."""
    found = dict(config)
    rope = found.pop("rope_parameters")
    if windows := rope.get("sliding_attention"):
        rope = rope["full_attention"]
        if config["model_type"] == "gemma3_text":
            found["rope_local_base_freq"] = windows["rope_theta"]
    outside = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in outside}
    if scaling.get("rope_type", "default") != "default":
        name = "type" if config["model_type"] == "phi3" else "rope_type"
        found["rope_scaling"] = {name if key == "rope_type" else key: value for key, value in scaling.items()}
    return found | outside


def logits(model: Any) -> torch.Tensor:
    """Logits [200, V] of the tokens of `hf_models.random_tokens(200)`."""
    tokens = torch.randint(64, (200,), generator=torch.Generator().manual_seed(200))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens[None]).logits[0]
    return found


def write(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, shape in json.loads((folder / "shapes.json").read_text()).items():
        eager = {"attn_implementation": shape.pop("attn_implementation")} if "attn_implementation" in shape else {}
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**as_4_takes_it(shape)), **eager)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name / "hf")
        torch.save(logits(model), folder / name / "logits.pt")


def read(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = {}
    for path in folder.glob("*/out"):
        eager = {"attn_implementation": "eager"} if path.parent.name == "gemma2" else {}
        found[path.parent.name] = logits(AutoModelForCausalLM.from_pretrained(path, **eager))
    torch.save(found, folder / "logits.pt")


if __name__ == "__main__":
    (write if sys.argv[1] == "write" else read)(Path(sys.argv[2]))
