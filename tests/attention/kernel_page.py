"""Tables of docs/explanation/kernels.md: `python -m tests.attention.kernel_page` prints them."""

from moba_train.attention.kernels import table


def markdown() -> str:
    """The tables as docs/explanation/kernels.md has them."""
    lines = ["| pass | file | block size | head dim | needs | measured |", "|---|---|---|---|---|---|"]
    for row in table.KERNELS:
        sizes = "any" if row.block_sizes is None else table.sizes_text(row.block_sizes)
        needs = f"compute capability 9.0, Triton {table._GLUON_TRITON}, all keys" if row.gluon else ""
        needs += ", topk 2 or more" if row.history else ""
        cells = row.does, f"`{row.file}`", sizes, ", ".join(map(str, row.head_widths)), needs, row.why
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| varlen kernel | head dim | compute capability | `composed` beats `triton` | why |"]
    lines += ["|---|---|---|---|---|"]
    for varlen in table.VARLEN:
        width, where = (f"up to {varlen.widest}", varlen.capabilities()) if varlen.majors else ("any", "CPU")
        beats = f"from blocks of {varlen.composed_from}" if varlen.composed_from else ""
        lines.append(f"| {' | '.join([varlen.name, width, where, beats, varlen.why])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
