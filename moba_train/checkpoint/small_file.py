"""Small JSON files about the checkpoints of a run: replaced atomically, bounded, and read without trust.

What they hold is a help and never the only copy: a file that cannot be used counts as missing, and one that cannot be
written costs what it would have told the next start. Both are warnings.
"""

import logging
from pathlib import Path
from typing import Any

from moba_train.checkpoint.manifest import write_json
from moba_train.errors import ForeignFileError
from moba_train.foreign_files import read_foreign
from moba_train.strict_json import from_json

LARGEST_BYTES = 2**20

logger = logging.getLogger(__name__)


def read_small_file(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one if there is no such file or, with a warning, if it cannot be used."""
    try:
        content = from_json(read_foreign(path, LARGEST_BYTES, links=False).decode())
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not a JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ForeignFileError, ValueError, RecursionError) as error:
        logger.warning("%s is ignored: %s", path, str(error).removeprefix(f"{path}: "))
        return {}
    return content


def replace_small_file(path: Path, content: dict[str, Any]) -> None:
    """Write `content` in place of what is there; a reader finds the old content or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_json(temporary, content)
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
