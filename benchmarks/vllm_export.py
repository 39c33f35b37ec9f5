"""vLLM with MoBA by our plugin, and with its own full attention: time to first token, and throughput.

    python -m benchmarks.vllm_export --output benchmarks/results/vllm-h200.json
    python -m benchmarks.vllm_export --cpu                                         # a rehearsal, in a minute

Each row is a process with vLLM's offline engine, a Llama of the shapes of Llama 3 8B and random weights, which are
equal in all rows: `full` without the plugin, `moba` with full attention for new tokens, `own` with MoBA for these also.
The last three layers are full. Time to first token is that of one request alone; throughput is that of several requests
at once, with a fixed number of new tokens each. No text is in the prefix cache; prompts are read in chunks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import length
from benchmarks.record import markdown, save, spread

PLUGIN = Path(__file__).parents[1] / "integrations" / "vllm"
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
}
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SETTINGS: dict[str, dict[str, Any]] = {"full": {}, "moba": {"moba_decode": "full"}, "own": {"moba_decode": "own"}}
CHUNK = 8192
"""New tokens of a step, at most."""

Result = dict[str, Any]


def config(args: argparse.Namespace) -> dict[str, Any]:
    """Contents of config.json, as an export has them."""
    moba = {"kind": "moba", "block_size": args.block_size, "topk": args.topk, "select": "head", "always": ["current"]}
    full = min(3, args.layers - 1)
    return (TINY if args.cpu else SHAPE) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": args.layers,
        "max_position_embeddings": max(args.contexts) + args.new_tokens,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32" if args.cpu else "bfloat16",
        "moba": {"layers": [moba] * (args.layers - full) + [{"kind": "full"}] * full},
    }


def measure(args: argparse.Namespace, folder: str) -> list[Result]:
    """One setting's results, in this process, which has vLLM."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=args.page_size,
        enable_prefix_caching=False,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=16,
        enforce_eager=args.eager,
        hf_overrides=SETTINGS[args.setting],
        **({"kv_cache_memory_bytes": 2**28} if args.cpu else {"gpu_memory_utilization": 0.85}),
    )
    generator = torch.Generator().manual_seed(0)

    def seconds(context: int, requests: int, new_tokens: int) -> float:
        prompts = torch.randint(2, SHAPE["vocab_size"], (requests, context), generator=generator).tolist()
        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        taken = time.perf_counter() - begin
        assert all(len(answer.outputs[0].token_ids) == new_tokens for answer in answers)
        return taken

    results = []
    for context in args.contexts:
        seconds(context, 1, 2)  # kernels are compiled and tuned
        first = spread([seconds(context, 1, 1) for _ in range(args.repeat)])
        requests = max(1, args.tokens // context)
        taken = seconds(context, requests, args.new_tokens)
        both = requests * (context + args.new_tokens)
        rates = {"requests": requests, "seconds": taken, "tokens_per_second": both / taken}
        results.append({"setting": args.setting, "context": context, "first_token_seconds": first, **rates})
    return results


def run(args: argparse.Namespace, folder: str, setting: str) -> list[Result]:
    """One setting's results, from a process of its own that finds the plugin by its entry point, or does not."""
    installed = Path(folder) / "site" / "moba_vllm-0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\nmoba = moba_vllm:register\n")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: moba-vllm\nVersion: 0\n")
    paths = [str(PLUGIN.parents[1]), str(PLUGIN), str(installed.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "" if setting == "full" else "moba",
    }
    file = Path(folder) / f"{setting}.json"
    command = [sys.executable, "-m", "benchmarks.vllm_export", *sys.argv[1:], "--setting", setting, "--folder", folder]
    subprocess.run(command, env=environment, check=True)
    found: list[Result] = json.loads(file.read_text())
    return found


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    rows = [["context", "setting", "first token", "requests at once", "tokens/s"]]
    for row in sorted(results, key=lambda row: row["context"]):
        first = f"{row['first_token_seconds']['median']:.2f} s"
        rate = f"{row['tokens_per_second']:,.0f}"
        rows.append([f"{row['context'] // 1024}K", row["setting"], first, str(row["requests"]), rate])
    return markdown(rows)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=length, nargs="+", default=[length("32K"), length("128K")])
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=4096, help="tokens of a block of MoBA")
    parser.add_argument("--topk", type=int, default=8, help="blocks of a query, its own included")
    parser.add_argument("--page-size", type=int, default=512, help="tokens of a page of vLLM; divides the block size")
    parser.add_argument("--tokens", type=length, default=length("512K"), help="prompt tokens of all requests at once")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens of each request in throughput")
    parser.add_argument("--repeat", type=int, default=2, help="measurements of the time to first token")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on vLLM's build for CPUs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--setting", choices=[*SETTINGS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu:
        small = {"contexts": [1024], "layers": 2, "block_size": 64, "topk": 4, "page_size": 32, "tokens": 2048}
        vars(args).update(small, new_tokens=4, eager=True)
    if args.setting:
        (Path(args.folder) / f"{args.setting}.json").write_text(json.dumps(measure(args, args.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(args)))
        results = []
        for setting in args.settings:
            results += run(args, folder, setting)
            print(table(results), flush=True)
    if args.output:
        settings = {key: value for key, value in vars(args).items() if key not in ("output", "setting", "folder")}
        save(args.output, settings, results)


if __name__ == "__main__":
    main()
