"""Seconds of a prompt and milliseconds of a new token of a whole model, with and without a CUDA graph.

    python -m benchmarks.generation --contexts 128K --output benchmarks/results/generation-8b-h200.json
    python -m benchmarks.generation --layers 24 --contexts 1M --output benchmarks/results/generation-24-layers-h200.json
    torchrun --nproc-per-node 4 -m benchmarks.generation --contexts 1M --output FILE   # on GPUs that share the keys

Random weights and tokens, one sequence, bf16. The prompt is read with MoBA; new tokens attend to all of it (`full`) or
to the selected blocks (`own`). A token's time is the host's, from one token to the next, drawn greedily: the mean, as a
graph is recorded once in 128 tokens, and the median, a token that repeats it. The first 130 tokens, which compile, are
left out. The text must be the same with and without the graph. The keys and values of an 8B model of 32 layers take
128 GiB at 1M tokens, which an H200 does not have with the weights: GPUs under torchrun share them, without a graph.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_rows import short
from benchmarks.options import length, need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.trainer_run import model_shape
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.world import World, joined_world
from moba_train.tools.inference.across_ranks import PromptRanks, generate_across_ranks, prompt_ranks
from moba_train.tools.inference.cache import Decode
from moba_train.tools.inference.generate import generate
from moba_train.tools.inference.graph import cuda_graph

WARM = 130
"""Tokens that are not timed: a graph is recorded again after 128 at the latest."""
DECODES: tuple[Decode, ...] = ("full", "own")


def random_model(shape: dict[str, Any], options: MobaAttention.Options, device: torch.device) -> Transformer:
    """A model whose layers are all MoBA, in bf16."""
    config = ModelConfig(**shape)
    with torch.device("meta"):
        model = Transformer(config, [{} for _ in range(config.layers)])
    model = model.to(torch.bfloat16).to_empty(device=device)
    initialize_weights(model, seed=0)
    model.set_attention([KINDS["moba"](options, config.head_width)] * config.layers)
    return model.eval()


def run(
    model: Transformer, prompt: list[int], tokens: int, decode: Decode, graph: bool, ranks: PromptRanks | None = None
) -> dict[str, Any]:
    """Seconds of the prompt, spread of the milliseconds of `tokens` tokens, peak memory and the text."""
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    options: dict[str, Any] = {"temperature": 0, "decode": decode}
    if ranks is None:
        steps = generate(model, prompt, WARM + tokens + 1, record=cuda_graph if graph else None, **options)
    else:
        steps = generate_across_ranks(ranks, model, prompt, WARM + tokens + 1, **options)
    text, times = [], []
    for step in steps:
        text.append(step)
        times.append(time.perf_counter())
    ms = [1000 * (after - before) for before, after in pairwise(times)]
    timed = spread(ms[WARM:]) | {"mean": statistics.mean(ms[WARM:])}
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"prompt_s": times[0] - began, "token_ms": timed, "peak_gib": peak, "text": text}


def table(results: list[dict[str, Any]]) -> str:
    """A line for each context, attention of new tokens, and way to launch."""
    rows = [["context", "new tokens attend", "launches", "prompt, s", "token, ms", "median", "peak GiB"]]
    for result in results:
        launches = "CUDA graph" if result["graph"] else "by the host"
        launches += f", {gpus} GPUs" if (gpus := result.get("gpus", 1)) > 1 else ""
        facts = [short(result["context"]), result["decode"], launches]
        if "error" in result:
            rows.append([*facts, result["error"], "", "", ""])
            continue
        token = [f"{result['token_ms'][name]:.2f}" for name in ("mean", "median")]
        rows.append([*facts, f"{result['prompt_s']:.1f}", *token, f"{result['peak_gib']:.1f}"])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--contexts", type=length, nargs="+", default=[2**17], help="tokens, e.g. 128K")
    parser.add_argument("--moba", default="512/8", help="BLOCK/TOPK, selected once for the heads of a group")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens that are timed")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    need_gpus(parser)
    with joined_world() if "RANK" in os.environ else nullcontext() as world:
        differ = measure(given, world)
    sys.exit(int(differ))


def measure(given: argparse.Namespace, world: World | None) -> bool:
    """Print and save all rows. Returns True if a text is another one with a graph."""
    block_size, topk = (int(number) for number in given.moba.split("/"))
    options = MobaAttention.Options(block_size=block_size, topk=topk, select="group")
    shape = model_shape(given.model) | ({"layers": given.layers} if given.layers else {})
    model = random_model(shape, options, torch.device("cuda"))
    gpus, ranks = 1, None
    if world is not None:
        gpus = world.size
        ranks = prompt_ranks(CPStrategy(gpus, "allgather", "zigzag", world.ranks_per_node), world)
    run(model, [0] * (2 * block_size * topk), 1, "own", False, ranks)  # compiles what reads a prompt
    results: list[dict[str, Any]] = []
    differ = False
    for context in given.contexts:
        prompt = torch.randint(shape["vocab_size"], (context,), generator=torch.Generator().manual_seed(0)).tolist()
        for decode in DECODES:
            texts = []
            for graph in (False, True) if ranks is None else (False,):
                result = {"context": context, "decode": decode, "graph": graph, "gpus": gpus}
                try:
                    result |= run(model, prompt, given.tokens, decode, graph, ranks)
                    texts.append(result.pop("text"))
                except torch.OutOfMemoryError as error:
                    result["error"] = f"out of memory: {str(error).partition('. ')[0]}"
                torch.cuda.empty_cache()
                results.append(result)
                if world is not None and not world.is_main:
                    continue
                print(table([result]).splitlines()[-1], flush=True)
                if given.output:
                    save(given.output, {"model": given.model, "layers": shape["layers"], "moba": given.moba}, results)
            if len(texts) == 2 and texts[0] != texts[1]:
                print(f"{decode} at {context} tokens: the text with the graph is another one", flush=True)
                differ = True
    if world is None or world.is_main:
        print(f"\n{table(results)}")
    return differ


if __name__ == "__main__":
    main()
