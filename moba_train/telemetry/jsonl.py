"""`metrics.jsonl`: the complete history of a run, one JSON object per line."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any


class JsonlSink:
    """Appends each record to `path` and flushes the file.

    A run that resumes from step N repeats the steps after N. The earlier records of these steps are moved to
    `metrics.discarded.jsonl`, so that the file holds every step once. At a fresh start, `resumed_step` is None and all
    earlier records are moved.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        if path.exists():
            _discard_after(path, -1 if resumed_step is None else resumed_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, oldest first.

    Lines that are not records are left out, such as one truncated by a kill or a full disk. Early versions wrote the
    record type under the key "kind"; it is returned under "type".
    """
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record.keys() & {"type", "kind"}:
                records.append(_with_type(record))
    return records


def _with_type(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its type under "type"; the order of the keys is kept."""
    return record if "type" in record else {"type" if key == "kind" else key: record[key] for key in record}


def _discard_after(path: Path, step: int) -> None:
    records = read_records(path)
    discarded = [record for record in records if record["step"] > step]
    kept = [record for record in records if record["step"] <= step]
    with path.with_suffix(".discarded.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in discarded)
    rewritten = path.with_suffix(".jsonl.tmp")
    with rewritten.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in kept)
        stream.flush()
        os.fsync(stream.fileno())
    rewritten.replace(path)
