"""DCP's index of a checkpoint, `.metadata`: a pickle, read so that it can neither run code nor name other files."""

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from moba_train.checkpoint.coverage import checked_storage
from moba_train.checkpoint.index_pickle import decode_index
from moba_train.checkpoint.manifest import FileEntry, read_verified
from moba_train.errors import CheckpointError

INDEX = ".metadata"

_SMALLEST_LIMIT = 1 << 20


def read_index(path: Path, files: Mapping[str, FileEntry]) -> Metadata:
    """The index of checkpoint `path`, whose manifest lists `files`: the description of its tensors, and where each
    chunk of them is stored.

    Every number of every tensor is stored once, in these files (checkpoint/coverage.py). Raises CheckpointError when
    the file is damaged or not such an index, UnreadableError when it could not be read.
    """
    file = path / INDEX
    content = read_verified(path, INDEX, files, _limit(files))
    try:
        index, places = decode_index(content)
        if type(index) is not Metadata:
            raise ValueError(f"it holds {type(index).__name__}, must hold DCP's Metadata")
        storage = checked_storage(vars(index).get("state_dict_metadata"), places, files)
    except (ValueError, AttributeError) as error:  # attributes may be missing
        raise CheckpointError(f"{file}: is not an index ({error}); use another checkpoint of this run") from error
    return Metadata(state_dict_metadata=index.state_dict_metadata, storage_data=storage)


def _limit(files: Mapping[str, FileEntry]) -> int:
    """Largest index in bytes: it describes a chunk in about 200 bytes, which DCP stores in at least 1,000. Nothing else
    limits it: the shards of a large model on thousands of ranks make gigabytes of it."""
    others = sum(entry["size"] for name, entry in files.items() if name != INDEX)
    return max(others, _SMALLEST_LIMIT)
