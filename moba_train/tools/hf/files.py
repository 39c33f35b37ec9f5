"""Files of a Hugging Face model's weights: `model.safetensors`, or several files and `model.safetensors.index.json`,
which names the file of each tensor. A reader opens one file at a time and reads the bytes asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moba_train.config.explain import given
from moba_train.errors import CheckpointError, ForeignFileError
from moba_train.foreign_files import INDEX_BYTES, folder_roots, open_foreign, read_foreign_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """Tensors of `folder` by their names. Raises CheckpointError when the folder cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._roots = folder_roots(folder)
        self._file_of = self._index() if (folder / INDEX).exists() else self._single()
        self._open: tuple[str, Any] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def file_of(self, name: str) -> str:
        """Name of the file that holds tensor `name`. Reading in the order of files opens each of them once."""
        return self._file_of[name]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, of any dtype, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, from the file's header. Raises CheckpointError if its dtype is not floating-point."""
        header = self._slice(name)
        if header.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{self.folder / self._file_of[name]}: {name} is {header.get_dtype()}, allowed: {', '.join(DTYPES)}; "
                "quantised weights must be converted first"
            )
        return tuple(header.get_shape())

    def read(self, name: str, part: Sequence[slice] = ()) -> Tensor:
        """The tensor on the CPU in the file's dtype, or the `part` of it: a slice for each leading dimension."""
        with self._readable(self._file_of[name]):
            return self._slice(name)[tuple(part) or ...]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        with self._readable(file):
            if self._open is None or self._open[0] != file:
                self._open = file, self._open_file(file)
            return self._open[1].get_slice(name)

    def _open_file(self, file: str) -> Any:
        """The library's reader of `file`."""
        with open_foreign(self.folder / file, None, self._roots) as stream:
            # The library takes a path and maps the file at once. This path is the open file, even if its name now
            # leads to another one.
            return safe_open(f"/dev/fd/{stream.fileno()}", framework="pt")

    def _single(self) -> dict[str, str]:
        if not (self.folder / SINGLE).exists():
            raise CheckpointError(f"{self.folder}: has neither {SINGLE} nor {INDEX}")
        with self._readable(SINGLE), self._open_file(SINGLE) as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE)

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            files = read_foreign_json(path, INDEX_BYTES, self._roots)["weight_map"]
            # A name with a path in it would lead out of the folder.
            strange = [file for file in files.values() if Path(file).name != file or not file.endswith(".safetensors")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: is not an index of safetensors files ({error})") from error
        if strange:
            raise CheckpointError(
                f"{path}: names the file {given(strange[0])}, allowed: *.safetensors in the same folder"
            )
        missing = sorted({file for file in files.values() if not (self.folder / file).is_file()})
        if missing:
            raise CheckpointError(f"{path}: names {', '.join(missing[:20])}, not found in the folder")
        return dict(files)

    @contextmanager
    def _readable(self, file: str) -> Iterator[None]:
        """Inside, errors of the library, and of a file that must not be read, become CheckpointErrors."""
        try:
            yield
        except ForeignFileError as error:
            raise CheckpointError(str(error)) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file}: cannot be read ({error}); get the file again") from error
