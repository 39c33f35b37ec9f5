"""Registers, shared memory and spills of our kernels on each GPU, by compiling them without one:

    python -m tests.attention.kernel_resources [--check]

writes the table of the installed Triton into benchmarks/measured/kernel-resources.md, or fails where the page has
another one. Heads of 128 channels, bf16, the largest tiles that each GPU gets.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import insert_tables, markdown
from tests.attention.compiled_gluon import forward_pass, one_pass
from tests.attention.compiled_triton import KIBIBYTES, GPUTarget, compile_for_hopper, kernels_at, triton

PAGE = Path(__file__).parents[2] / "benchmarks" / "measured" / "kernel-resources.md"
TARGETS: list[tuple[str, Any, int]] = [*(("cuda", name, 32) for name in sorted(KIBIBYTES)), ("hip", "gfx942", 64)]
GLUON = {
    "hopper/blocks_from_512_forward": lambda: forward_pass(128)[0],
    "hopper/blocks_128_gradients": lambda: one_pass("gathered", "bf16", "bf16", 128)[0],
    "hopper/blocks_256_to_4096_gradients": lambda: one_pass("history", "bf16", "bf16", 128)[0],
}
"""Kernels for sm_90 alone: the largest one of each file."""
LOCAL_KIBIBYTES = 64
"""Shared memory of a program on gfx942, by AMD's data sheet."""


def resources(compiled: Any) -> str:
    """Registers of a thread, KiB of shared memory and bytes of spilled registers of a thread."""
    shared = f"{compiled.metadata.shared / 1024:.0f}"
    if text := compiled.asm.get("amdgcn"):
        registers, spilled = (
            int(re.findall(rf"\.?{name}:\s+(\d+)", text)[-1]) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return f"{registers} / {shared} / {spilled}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.findall(rf"{name}:(\d+)", report)[-1]) for name in ("REG", "STACK"))
    return f"{registers} / {shared} / {spilled}"


def table() -> str:
    """A row for each kernel, a column for each GPU."""
    columns: list[dict[str, str]] = []
    for kind, name, width in TARGETS:
        limit = KIBIBYTES.get(name, LOCAL_KIBIBYTES) * 1024
        target = GPUTarget(kind, name, width)
        columns.append({})
        for block_size in (128, 4096):
            for kernel, tile, constants in kernels_at(128, block_size, limit):
                options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "target": target}
                try:
                    compiled = compile_for_hopper(kernel, constants, tile.keys, **options)
                    columns[-1][kernel.__name__] = resources(compiled)
                except RuntimeError as error:  # no compiler of Triton's takes it
                    columns[-1][kernel.__name__] = type(error).__name__
                print(name, kernel.__name__, columns[-1][kernel.__name__], flush=True)
    for name, compile_it in GLUON.items():
        columns[0][name] = ""
        columns[[target[1] for target in TARGETS].index(90)][name] = resources(compile_it())
    heads = ["kernel", *(f"sm_{name}" if kind == "cuda" else str(name) for kind, name, _ in TARGETS)]
    return markdown(
        [heads, *([f"`{kernel}`", *(column.get(kernel, "") for column in columns)] for kernel in columns[0])]
    )


def main(check: bool) -> None:
    """Write the table, or compare it with the page's. Raises SystemExit with the rows that the page does not have."""
    release = ".".join(triton.__version__.split(".")[:2])
    page = PAGE.read_text()
    made = insert_tables(page, {f"<!-- Triton {release} -->": table()})
    if not check:
        PAGE.write_text(made)
    elif made != page:
        other = [line for line in made.splitlines() if line not in page.splitlines()]
        raise SystemExit("\n".join([f"{PAGE.name}: with Triton {release} it has other rows:", *other]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    main(**vars(parser.parse_args()))
