"""Measured steps that `benchmarks.step_time` compares with plan's, and the rows that it leaves out, with the reason."""

from dataclasses import dataclass, field
from functools import partial

from benchmarks.training_rows import Row

FLASH2 = "attention.full.backend=flash"
"""FlashAttention-2, which full attention ran on before flash-attn-4 was used."""


@dataclass(frozen=True)
class Measured:
    """A measured step: where its number is, and the recipe that it is of, as a row of `benchmarks.training`."""

    file: str
    keys: tuple[str, ...]
    """Keys of the median in the file's `results`."""
    row: str
    model: str = "llama-1b"
    gpus: int = 1
    per_gpu: int = 2
    """Sequences of each GPU in a step, and in a pass unless the row says otherwise."""
    layers: int | None = None
    fit: bool = False
    defaults: Row = field(default_factory=Row)
    """Settings that `row` leaves out."""


OLD_1B = "training-1b-h200-x2.json"
LENGTHS = "training-8b-16-layers-lengths-h100-x2.json"


def of_two_gpus(file: str, row: str, layers: int | None = None) -> Measured:
    """A row of the 8B model, or of so many of its layers, on two GPUs, which rates are fitted to."""
    return Measured(file, (row,), row, "llama3-8b", 2, 1, layers, fit=True)


half_8b = partial(of_two_gpus, layers=16)
whole_8b = partial(of_two_gpus, "training-8b-h200-x2.json")


def float8_128k(row: str) -> Measured:
    """A row of the 8B model in FP8 on four GPUs at 128K, which rates are fitted to."""
    return Measured("training-8b-128k-h200-x4.json", (row,), row, "llama3-8b", 4, 1, fit=True)


def narrow(row: str) -> Measured:
    """A row of the dense model next to experts: hidden size 2,048, so fewer products for each activation than 8B's."""
    return Measured("training-experts-compiled-h200-x2.json", (row,), row, "qwen3-30b-a3b", 2, 1, 20, fit=True)


STEPS = (
    of_two_gpus("training-8b-8k-h200-x2.json", "8K:full:steps10"),
    Measured("training-1b-h200.json", ("full, compiled",), "8K:full:packed", fit=True),
    Measured("training-1b-h200.json", ("full",), "8K:full:eager:packed", fit=True),
    Measured("checkpoint-stall-8b-h200-x2-thread.json", (), "8K:full:eager:full:packed", "llama3-8b", 2, 2, fit=True),
    of_two_gpus("training-8b-8k-copy-engines-h200-x2.json", "8K:full:fp8:steps10"),
    half_8b(LENGTHS, "8K:full:none"),
    half_8b(LENGTHS, "64K:full:full:cp2"),
    half_8b(LENGTHS, "64K:moba-512-8:full:cp2"),
    half_8b(LENGTHS, "128K:full:full:cp2:warm1:steps2"),
    half_8b(LENGTHS, "128K:moba-512-8:budget:cp2:warm2:steps3"),
    whole_8b("128K:full:full:cp2:warm1:steps2"),
    whole_8b("128K:moba-512-8:budget:cp2:warm1:steps3"),
    whole_8b("512K:moba-4096-12-last3:budget:offload:cp2:warm1:steps1:memory.host_gib=110"),
    float8_128k("128K:moba-512-8:budget:cp4:fp8"),
    float8_128k("128K:moba-512-8:budget:cp4:fp8:parallel.cp_transport=allgather"),
    narrow("8K:full:full:batch8:micro4:warm2:steps4:model.moe=null"),
    narrow("128K:moba-512-8:full:cp2:warm2:steps3:model.moe=null"),
    Measured("training-1b-h200.json", ("full, recomputed",), "8K:full:eager:full:packed"),
    Measured("training-1b-h200.json", ("MoBA 512/3, last 3 full",), "8K:moba-512-3-last3:eager:packed"),
    Measured("training-1b-h200.json", ("MoBA 512/3, last 3 full, compiled",), "8K:moba-512-3-last3:packed"),
    Measured("training-1b-h200-flash2.json", ("full",), f"8K:full:eager:packed:{FLASH2}"),
    Measured(OLD_1B, ("full",), f"8K:full:eager:packed:{FLASH2}", gpus=2),
    Measured(OLD_1B, ("full, compiled",), f"8K:full:packed:{FLASH2}", gpus=2),
    Measured(OLD_1B, ("full, recomputed",), f"8K:full:eager:full:packed:{FLASH2}", gpus=2),
    Measured("probe-cost-h200.json", (), "8K:moba-512-3-last3:eager:packed:micro1:batch8"),
    Measured("determinism-h200.json", ("runs", "as it is"), "8K:full:eager:packed"),
    Measured("checkpoint-stall-8b-h200-x2.json", (), "8K:full:eager:full:packed", "llama3-8b", 2, 1),
    Measured("finite-check-h200-x2.json", (), "8K:full:eager:full:packed", "llama3-8b", 2, 1, layers=8),
    Measured("checkpoint-stall-8b-h200-x4-contexts.json", (), "8K:full:eager:full:packed", "llama3-8b", 4, 1),
    Measured("checkpoint-stall-8b-h200-x4.json", (), "8K:full:eager:full:packed", "llama3-8b", 4, 1),
)
EAGER_LOSS = {"training-1b-h200.json", OLD_1B, "training-1b-h200-flash2.json"}
"""Files of before `compile` compiled the loss as well."""
LAST_DAY_OF_TWO = "2026-11-26"
"""Until this day the loss computed its logits twice, but for `LOGITS_ONCE`."""
LOGITS_ONCE = {
    "training-8b-8k-logits-once-h200-x2.json",
    "training-8b-1m-h200-x4.json",
    "training-8b-1m-512-8-h200-x4.json",
}
"""Files of that day whose loss computed its logits once, as it does since."""
FIRST_DAY_OF_FEWER_COPIES = "2026-11-29"
"""Since then, what no other rank has a part of is copied less; what it took before is left out of older times."""
WHOLE_FILES = ("training-8b-*.json", "training-experts-*-h200*.json")
"""Results of `benchmarks.training` of which all rows are compared."""
WAITED = f"Ulysses, before `auto` took all-gather, and ranks waited for each other; measured again (`{LENGTHS}`)"
SLOW_FLOAT8 = "before FP8's weights were cast in one pass, and norms' gradients apart from transposed casts"
RETRIED = "GPU memory ran out for the allocator, which freed what it kept and tried again (`allocator_retries`)"
LEFT_OUT = {
    ("training-1b-h200-moba-reference.json", ""): "MoBA's reference in plain PyTorch",
    (OLD_1B, "MoBA 512/3, last 3 full"): "MoBA's reference in plain PyTorch",
    ("kinds-before-after-h200.json", ""): "the recipes of training-1b-h200.json, measured once more",
    ("determinism-h200.json", "deterministic"): "kernels that repeat bit by bit, which plan knows no rates of",
    (
        "training-8b-16-layers-h100-x2.json",
        "8K:full:none:batch8:micro1:pp2:eager:parallel.pp_schedule=zero_bubble",
    ): "the split backward pass of a zero-bubble pipeline takes longer than plan knows: predicted 18 % shorter",
    ("training-8b-16-layers-h100-x2.json", "64K:full:full:cp2"): WAITED,
    ("training-8b-16-layers-h100-x2.json", "64K:moba-512-8:full:cp2"): WAITED,
    ("training-8b-16-layers-h100-x2.json", "128K:full:full:cp2:warm1:steps2"): WAITED,
    ("training-8b-16-layers-h100-x2.json", "128K:moba-512-8:budget:cp2:warm2:steps3"): WAITED,
    ("training-8b-h200-x2.json", "8K:full:none:fp8-rowwise"): "the rates of FP8 are those of one scale a tensor; "
    "casting with one a row takes longer: predicted 21 % shorter",
    ("training-8b-h200-x4.json", "8K:full:none:tp2:cp2"): "one sequence at a time on four GPUs: the step waits for the "
    "host; predicted 37 % shorter",
    (
        "training-8b-h200-x4-again.json",
        "8K:full:none:tp2:cp2:batch4:micro2",
    ): "two sequences at a time on four GPUs; not profiled there: predicted 18 % shorter; on another machine, later, "
    "8 % (`training-8b-8k-tp2-cp2-h200-x4.json`)",
    (
        "training-8b-8k-tp2-cp2-h200-x4.json",
        "8K:full:none:tp2:cp2:batch4:micro2:parallel.tp_overlap=true",
    ): "`tp_overlap` makes this step longer, plan has it shorter; the host is late with its many launches: "
    "predicted 31 % shorter",
    (
        "training-8b-8k-h100-x4.json",
        "8K:full:none:tp2:cp2:batch4:micro2",
    ): "two sequences at a time on four GPUs; more communication, waits in it, is exposed than plan knows: predicted "
    "11 % shorter",
    ("training-8b-h200-x4.json", "128K:moba-512-8:budget:cp4:warm1:steps3"): RETRIED,
    ("training-8b-h200-x4.json", "128K:moba-512-8:budget:cp4:fp8:warm1:steps3"): RETRIED,
    ("training-8b-h200-x4.json", "8K:full:none:fp8"): SLOW_FLOAT8,
    ("training-8b-h200-x2.json", "8K:full:none:fp8"): SLOW_FLOAT8,
    ("training-8b-h200-x2.json", "128K:moba-512-8:budget:cp2:fp8:warm1:steps3"): SLOW_FLOAT8,
    ("training-8b-h200-x2-again.json", "8K:full:none:fp8"): SLOW_FLOAT8,
    ("training-8b-8k-h200-x2.json", "8K:full:fp8"): SLOW_FLOAT8,
    ("training-8b-8k-h200-x2.json", "8K:full:fp8:steps10"): SLOW_FLOAT8,
    ("training-8b-8k-flash4-h200-x2.json", "8K:full:fp8:steps10"): SLOW_FLOAT8,
    ("training-8b-16-layers-h200.json", "8K:full:none:fp8"): SLOW_FLOAT8,
    ("training-8b-16-layers-h100-x2.json", "8K:full:none:fp8"): SLOW_FLOAT8,
    ("training-8b-16-layers-512k-h100-x2.json", "128K:moba-512-8:budget:cp2:fp8:warm2:steps3"): SLOW_FLOAT8,
    ("training-8b-16-layers-long-h100-x2.json", "128K:moba-512-8:budget:cp2:fp8:warm2:steps3"): SLOW_FLOAT8,
    (
        "training-8b-8k-autotuned-h200-x2.json",
        "8K:full:fp8:parallel.fsdp_copy_engines=true:steps10",
    ): "torch's choice of kernels by measuring, which plan knows no rates of",
    (
        "training-8b-8k-output-unit-h200-x2.json",
        "8K:full:parallel.gradient_transport=all_to_all:steps10",
    ): "gradients by an all-to-all in bf16: 5 ms longer than in float32, and removed",
    ("training-8b-128k-lora-h200.json", ""): "adapters on a frozen base: predicted 9 and 20 % longer",
    ("training-8b-128k-lora-budget-h200.json", ""): "adapters on a frozen base: predicted 19 % longer",
    ("training-experts-h200.json", ""): "what a rank has alone was copied more; measured again",
    ("training-experts-h200-x4.json", ""): "routers of random weights sent all tokens to few experts",
    ("miniatures-h200.json", ""): "25.7M parameters, steps of 68 to 208 ms: predicted shorter, as the host decides",
}
"""Rows with the time of training steps that are not predicted, and why: a file, and the row or all (an empty text)."""
