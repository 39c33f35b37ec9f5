"""Asks vLLM for the continuations of prompts: `python -m tests.integrations.vllm.answers FILE`.

FILE is JSON: `engine` (arguments of `vllm.LLM`), `tokens` (new ones of each prompt), `rounds` (lists of prompts, asked
one after the other) and `scored` (a prompt whose tokens' logarithmic probabilities are wanted). The answers replace it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def answers(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens of each prompt of each round, how many tokens of each were found in the prefix cache, and the scores."""
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, dtype="float32", **request["engine"])
    greedy = SamplingParams(temperature=0, max_tokens=request["tokens"], detokenize=False, ignore_eos=True)
    rounds = [
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        for prompts in request["rounds"]
    ]
    found: dict[str, Any] = {
        "tokens": [[list(answer.outputs[0].token_ids) for answer in answered] for answered in rounds],
        "cached": [[answer.num_cached_tokens for answer in answered] for answered in rounds],
    }
    # On a GPU the plugin reads prompts with our kernels where they are installed.
    ours = any(name.startswith("moba_train") for name in sys.modules)
    assert not ours or torch.cuda.is_available(), "the plugin needs our package"
    if scored := request.get("scored"):
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        (answer,) = llm.generate([{"prompt_token_ids": scored}], params, use_tqdm=False)
        pairs = zip(answer.prompt_logprobs[1:], scored[1:], strict=True)
        found["scores"] = [logprobs[token].logprob for logprobs, token in pairs]
    return found


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps(answers(json.loads(file.read_text()))))
