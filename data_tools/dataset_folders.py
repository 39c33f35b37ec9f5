"""Folders of Hugging Face data sets on this machine: those that `save_to_disk` wrote, and copies of a hub repository.

`save_to_disk` writes .arrow files, which `state.json` lists, into one folder for each split. On the hub a split is in
the name of a file (`train-00000-of-00004.parquet`, `test.jsonl`) or of its folder.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from moba_train.errors import DataError
from moba_train.foreign_files import read_foreign_json

COLUMNS = (".parquet", ".arrow")
"""Suffixes of files with columns."""
METADATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json"))
"""Files that describe a data set."""
SPLITS = frozenset(("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"))
"""Words that name a split, alone in the name of a file or folder."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?")
"""Name of a shard; some end in a hash."""
_WITH_SPLITS = (*COLUMNS, ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst")
"""Suffixes of files whose names may name a split."""


def saved_files(folder: str, names: Sequence[str]) -> list[str] | None:
    """Names of the files of the data set that `save_to_disk` wrote into `folder`, which has the files `names`; None if
    it wrote none. Files that `datasets` caches in such a folder are not among them. Raises DataError when one is
    missing."""
    if not {"state.json", "dataset_info.json"} <= set(names):
        return None
    state = read_foreign_json(Path(folder, "state.json"))
    listed = state.get("_data_files") if isinstance(state, dict) else None
    given = [file.get("filename") if isinstance(file, dict) else None for file in listed or ()]
    files = [file for file in given if isinstance(file, str)]
    if len(files) < len(given) or (isinstance(state, dict) and state.get("_indices_files")):
        raise DataError(f"{folder}/state.json lists no files that can be read; write the data set again (save_to_disk)")
    if missing := sorted(set(files) - set(names)):
        raise DataError(f"{folder}/{missing[0]} is missing, which state.json lists; copy the data set again")
    return files


def select_split(folder: str, names: Sequence[str], split: str | None, option: str) -> list[str]:
    """Those of the files `names` in `folder` that belong to `split`; all of them if none is asked for and there are
    not several. Raises DataError when there are several, or not the one that is asked for."""
    saved = {part.name for part in _folders(folder, names) if (part / "state.json").is_file()}
    splits = {name: _split(name, saved) for name in names}
    found = sorted({name for name in splits.values() if name})
    if split is None and len(found) > 1:
        remedy = "give --split, or name files of it" if option == "--input" else "name the files of one"
        raise DataError(f"{option} {folder} has the splits {', '.join(found)}; {remedy}")
    if split is not None and split not in found:
        raise DataError(f"--split {split}: --input {folder} has {', '.join(found) or 'no splits'}")
    return [name for name in names if split in (None, splits[name])]


def _folders(folder: str, names: Sequence[str]) -> set[Path]:
    return {Path(folder, os.path.dirname(name)) for name in names if os.path.dirname(name)}


def _split(name: str, saved: set[str]) -> str | None:
    """Split that the path of a file names; `saved`: folders that `save_to_disk` wrote."""
    *folders, file = Path(name).parts
    stem = file.split(".")[0]
    if not file.endswith(_WITH_SPLITS):
        return None
    if folders and folders[-1] in saved:
        return folders[-1]
    if shard := _SHARD.fullmatch(stem):
        return shard[1]
    # A folder of code may have a test/cases.json and a dev/settings.json.
    words = folders[::-1] if file.endswith(COLUMNS) else []
    return next((word for word in (stem, *words) if word in SPLITS and (words or folders in ([], ["data"]))), None)
