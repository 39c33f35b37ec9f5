"""Weights in MXFP4, as OpenAI publishes gpt-oss: read as bfloat16, which has all of their values.

32 neighbours along a matrix's last dimension are 16 bytes, each two numbers of four bits (E2M1, the lower half first),
and share a byte, the exponent of a power of two plus 127 (OCP Microscaling Formats, version 1.0). A tensor NAME is two:
NAME_blocks [..., columns / 32, 16] and NAME_scales [..., columns / 32]. It has the last two dimensions of what
transformers makes of them the other way round.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moba_train.errors import CheckpointError
from moba_train.tools.hf.files import SafetensorsFolder

_BLOCKS = "_blocks"
_SCALES = "_scales"
_BIAS = 127
_COLUMNS = 32
"""Numbers with one scale."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])


def open_weights(folder: Path) -> SafetensorsFolder:
    """Weights in `folder`; those in MXFP4 as if they were not. Raises CheckpointError as `SafetensorsFolder`."""
    files = SafetensorsFolder(folder)
    return Mxfp4Folder(folder) if any(name.endswith(_BLOCKS) for name in files.names) else files


class Mxfp4Folder(SafetensorsFolder):
    """Tensors of a folder, of which some are in MXFP4; a pair of theirs has one name."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        packed = {name.removesuffix(_BLOCKS) for name in super().names if self._is_packed(name.removesuffix(_BLOCKS))}
        halves = {name + half for name in packed for half in (_BLOCKS, _SCALES)}
        return (super().names - halves) | packed

    def _is_packed(self, name: str) -> bool:
        return {name + _BLOCKS, name + _SCALES} <= super().names

    def file_of(self, name: str) -> str:
        """Name of the file that holds tensor `name`, or its numbers."""
        return super().file_of(name + _BLOCKS if self._is_packed(name) else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        if not self._is_packed(name):
            return super().shape(name)
        blocks = self.stored_shape(name + _BLOCKS)
        scales = self.stored_shape(name + _SCALES)
        if len(scales) < 2 or blocks != (*scales, _COLUMNS // 2):
            raise CheckpointError(
                f"{self.folder}: {name + _BLOCKS} has shape {list(blocks)}, {name + _SCALES} {list(scales)}; allowed: "
                f"[..., columns / {_COLUMNS}] for the second, and {_COLUMNS // 2} more numbers for each of its own"
            )
        *others, rows, groups = scales
        return (*others, groups * _COLUMNS, rows)

    def read(self, name: str, part: Sequence[slice] = ()) -> Tensor:
        """The tensor on the CPU, in bfloat16 if it is in MXFP4, or the `part` of it."""
        if not self._is_packed(name):
            return super().read(name, part)
        whole: list[slice] = [*part, *(slice(0, size) for size in self.shape(name)[len(part) :])]
        columns = whole[-2]
        first = columns.start or 0
        start = first // _COLUMNS
        stored = (*whole[:-2], whole[-1], slice(start, -(-columns.stop // _COLUMNS)))
        blocks = super().read(name + _BLOCKS, stored)
        scales = super().read(name + _SCALES, stored)
        found = dequantized(blocks, scales).mT
        return found.narrow(-2, first - start * _COLUMNS, columns.stop - first)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers [..., columns], bfloat16, of blocks [..., columns / 32, 16] and scales [..., columns / 32], uint8."""
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(_VALUES[halves.int()], scales.int().unsqueeze(-1) - _BIAS).flatten(-2).bfloat16()
