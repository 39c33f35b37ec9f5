"""MoBA written down a second time, from the specification alone: lists, loops and float64. Slow on purpose.

Nothing here comes from moba_train. Every query and head has an explicit list of selected blocks and one explicit
softmax; gradients are autograd's.
"""

import torch
from torch import Tensor

Selection = list[list[list[int]]]
"""[head][query] -> ascending ids of the selected history blocks; ids count over the whole packed sequence."""


def cut_blocks(lengths: list[int], block_size: int) -> list[tuple[int, int, int]]:
    """(first token, end token, document) of every block, in order."""
    blocks, start = [], 0
    for document, length in enumerate(lengths):
        blocks += [
            (begin, min(begin + block_size, start + length), document)
            for begin in range(start, start + length, block_size)
        ]
        start += length
    return blocks


def history(lengths: list[int], block_size: int, token: int) -> tuple[int, list[int]]:
    """(the token's own block, the candidates: blocks of its document that end before the own one begins)."""
    blocks = cut_blocks(lengths, block_size)
    own = next(i for i, (begin, end, _) in enumerate(blocks) if begin <= token < end)
    return own, [i for i in range(own) if blocks[i][2] == blocks[own][2]]


def block_means(k: Tensor, lengths: list[int], block_size: int) -> list[Tensor]:
    """Mean of K over each block, [Hkv, d] each: summed token by token in float32 (float64 for float64 K), rounded."""
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    means = []
    for begin, end, _ in cut_blocks(lengths, block_size):
        total = torch.zeros_like(k[0], dtype=wide)
        for token in range(begin, end):
            total = total + k[token].to(wide)
        means.append((total / (end - begin)).to(k.dtype))
    return means


def gates(q: Tensor, means: list[Tensor], token: int, head: int, kv_heads: int, select: str, block: int) -> float:
    """q . block key in float64; with "group" summed over the query heads that share the key/value head."""
    group = q.shape[1] // kv_heads
    kv_head = head // group
    members = range(kv_head * group, (kv_head + 1) * group) if select == "group" else [head]
    key = means[block][kv_head].double()
    return sum(float((q[token, member].double() * key).sum()) for member in members)


def select_blocks(
    q: Tensor,
    k: Tensor,
    lengths: list[int],
    *,
    block_size: int,
    topk: int,
    select: str = "head",
    always: tuple[str, ...] = ("current",),
) -> Selection:
    """The history blocks of every head and query."""
    q, k = q.detach(), k.detach()
    means = block_means(k, lengths, block_size)
    selection: Selection = []
    for head in range(q.shape[1]):
        rows = []
        for token in range(q.shape[0]):
            own, candidates = history(lengths, block_size, token)
            forced = set()
            if candidates and "previous" in always:
                forced.add(own - 1)
            if candidates and "first" in always:
                forced.add(candidates[0])
            rank = {
                block: (block not in forced, -gates(q, means, token, head, k.shape[1], select, block), block)
                for block in candidates
            }
            rows.append(sorted(sorted(candidates, key=rank.__getitem__)[: topk - 1]))
        selection.append(rows)
    return selection


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], selection: Selection, *, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, H, d] and lse [H, T] for a selection: one softmax over the own block's past and the selected blocks."""
    blocks = cut_blocks(lengths, block_size)
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for token in range(q.shape[0]):
        own, _ = history(lengths, block_size, token)
        for head in range(q.shape[1]):
            keys = [t for block in selection[head][token] for t in range(*blocks[block][:2])]
            keys += range(blocks[own][0], token + 1)
            scores = (k[keys, head // group] * q[token, head]).sum(-1) * scale
            top = scores.detach().max()
            weights = (scores - top).exp()
            outs.append((weights.unsqueeze(-1) * v[keys, head // group]).sum(0) / weights.sum())
            lses.append(top + weights.sum().log())
    if not outs:
        return torch.zeros_like(q), q.new_zeros(q.shape[1], 0)
    return torch.stack(outs).view_as(q), torch.stack(lses).view(q.shape[0], q.shape[1]).T


def moba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    block_size: int,
    topk: int,
    select: str = "head",
    always: tuple[str, ...] = ("current",),
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Selection and attention: (out, lse)."""
    selection = select_blocks(q, k, lengths, block_size=block_size, topk=topk, select=select, always=always)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, k, v, lengths, selection, block_size=block_size, scale=scale)


def full(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Dense causal attention inside each document, (out, lse)."""
    nothing: Selection = [[[] for _ in range(q.shape[0])] for _ in range(q.shape[1])]
    longest = max([1, *lengths])
    return attend(q, k, v, lengths, nothing, block_size=longest, scale=q.shape[-1] ** -0.5)
