"""Runs exported models where `import moba_train` fails: `python without_package.py PROMPTS FOLDER ...`.

PROMPTS holds the tokens of two prompts, the longer one first. What the model in FOLDER/out says, in float64 unless
named otherwise, goes to FOLDER/answers.pt.
"""

import sys
from copy import deepcopy
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch


class _Blocked:
    """Finder of modules that refuses this package."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "moba_train":
            raise ModuleNotFoundError(f"No module named {name!r}: blocked by the test")


NEW = 8


def load(folder: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float64, "trust_remote_code": True} | options
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def answers(folder: str, prompts: list[torch.Tensor]) -> dict[str, Any]:
    """What the model says by each way of asking it."""
    from transformers import DynamicCache, StaticCache

    long, short = prompts
    try:
        found: dict[str, Any] = {"ordinary": type(load(folder, trust_remote_code=False)).__name__}
    except ValueError as error:
        found = {"ordinary": str(error)}
    model = load(folder)
    own = load(folder, moba_decode="own")
    found["configs"] = type(model).config_class.__name__, type(model.config).__name__
    found["logits"] = deepcopy(model)(long[None]).logits[0]
    for name in ("eager", "flex_attention"):
        found[name] = load(folder, attn_implementation=name)(long[None]).logits[0]
    found["bfloat16"] = load(folder, dtype=torch.bfloat16)(long[None]).logits[0]

    model.save_pretrained(saved := f"{Path(folder).parent}/saved")
    found["saved"] = load(saved)(long[None]).logits[0]

    cache = DynamicCache()
    parts = [long[:70], *long[70:82].split(1), long[82:]]
    found["decoded"] = torch.cat([own(part[None], past_key_values=cache).logits[0] for part in parts])

    width = len(long)
    batch, mask = torch.zeros(2, 2, width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        batch[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    found["padded"] = model(batch, attention_mask=mask).logits[1, width - len(short) :]
    found["short"] = model(short[None]).logits[0]
    right = torch.cat([short, torch.zeros(width - len(short), dtype=torch.int64)])
    found["padded right"] = model(right[None]).logits[0, : len(short)]

    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for name, asked in (("full", model), ("own", own)):
        found[f"generated {name}"] = asked.generate(batch, attention_mask=mask, **options)[:, width:]
        static = asked.generate(batch, attention_mask=mask, cache_implementation="static", **options)
        found[f"static {name}"] = static[:, width:]
    # Without a token for padding, which generate would find in the prompt: an assistant is not given the mask.
    # The end of text is no token's id: transformers 5.0 looks guesses up only where there is one.
    alone = {"attention_mask": torch.ones_like(long[None]), **options, "pad_token_id": None, "eos_token_id": -1}
    for name, guesses in {"looked up": {"prompt_lookup_num_tokens": 3}, "assisted": {"assistant_model": model}}.items():
        try:
            found[name] = own.generate(long[None], **guesses, **alone)[0, width:]
        except ValueError as error:
            found[name] = str(error)
    beams = own.generate(
        batch,
        attention_mask=mask,
        num_beams=3,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    found["beam scores"] = beams.sequences_scores
    found["beams"] = [
        own(sequence[width - len(prompt) :][None]).logits[0].log_softmax(-1)[-NEW - 1 : -1]
        .gather(1, sequence[-NEW:, None]).sum()
        for sequence, prompt in zip(beams.sequences, prompts, strict=True)
    ]  # fmt: skip
    for name, call in {
        "quantized": lambda: model.generate(long[None], cache_implementation="offloaded_static", **alone),
        "guesses": lambda: model.generate(long[None], prompt_lookup_num_tokens=3, **alone),
        "overfull": lambda: model(long[None], past_key_values=StaticCache(model.config, max_cache_len=width - 1)),
        "cut": lambda: cache.crop(-1),
        "holes": lambda: model(batch[:1], attention_mask=torch.tensor([[1, 0] * (width // 2)])),
        "packed": lambda: model(long[None], position_ids=torch.arange(width)[None] % 50),
        "attentions": lambda: model(long[None], output_attentions=True),
        "decode": lambda: load(folder, moba_decode="moba"),
    }.items():
        try:
            call()
            found[name] = "nothing was refused"
        except ValueError as error:
            found[name] = str(error)
    return found


def read_code_once() -> None:
    """Keeps the imports that transformers finds in code: it looks in the same one with each model, 0.1 s a time."""
    from transformers import dynamic_module_utils

    find = dynamic_module_utils.get_imports
    found: dict[bytes, list[str]] = {}

    def get_imports(filename: str | PathLike[Any]) -> list[str]:
        code = Path(filename).read_bytes()
        if code not in found:
            found[code] = find(filename)
        return found[code]

    dynamic_module_utils.get_imports = get_imports


if __name__ == "__main__":
    sys.meta_path.insert(0, _Blocked())
    read_code_once()
    try:
        import_module("moba_train")
    except ModuleNotFoundError:
        prompts, *folders = sys.argv[1:]
        for folder in folders:
            torch.save(answers(f"{folder}/out", torch.load(prompts)), f"{folder}/answers.pt")
    else:
        sys.exit("moba_train can be imported")
