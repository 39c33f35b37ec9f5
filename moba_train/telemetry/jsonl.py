"""`metrics.jsonl`: the complete history of a run, one JSON object a line."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CURVES = ("metrics", "evaluation")


class JsonlSink:
    """Appends each record to `path` and flushes it.

    A run that resumes from step N repeats the steps after N. Their earlier records move to `metrics.discarded.jsonl`,
    so that the file holds every step once. `resumed_step` None is a fresh start: all earlier records move. A record of
    kind "rollback" does the same for the metrics and evaluations after its `step_to`; other events stay.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        self._path = path
        if path.exists():
            step = -1 if resumed_step is None else resumed_step
            _discard(path, lambda record: record["step"] > step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "rollback":
            self._file.close()
            _discard(self._path, lambda old: old["kind"] in _CURVES and old["step"] > record["step_to"])
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, oldest first. A line cut short by a kill or a full disk is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def _discard(path: Path, unwanted: Callable[[dict[str, Any]], bool]) -> None:
    records = read_records(path)
    discarded = [record for record in records if unwanted(record)]
    kept = [record for record in records if not unwanted(record)]
    with path.with_suffix(".discarded.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in discarded)
    rewritten = path.with_suffix(".jsonl.tmp")
    with rewritten.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in kept)
        stream.flush()
        os.fsync(stream.fileno())
    rewritten.replace(path)
