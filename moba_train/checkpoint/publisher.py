"""Publication of a checkpoint by all ranks, in the first of its folders that takes it.

What a file system needs for it is in publish.py; here the ranks agree on every step of it.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moba_train.checkpoint import publish
from moba_train.checkpoint.manifest import FileEntry
from moba_train.checkpoint.process_group import SaveFailedError, SaveGroup
from moba_train.checkpoint.publish import Accept
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CheckpointError, LaunchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A folder for checkpoints, which every rank must see, and which of them stay in it."""

    folder: Path
    retention: Retention
    key: str
    """Key of the recipe that chooses the folder."""


class Publisher:
    """Publishes checkpoints in the first of `places` that takes them. Made, and each method called, on every rank.

    `check_lock` is called on rank 0 before anything is written, published or removed. It raises LaunchError when the
    run folder is not this run's any more, and OSError when that cannot be told.

    Raises CheckpointError, when made, when no rank can write into a place, or not every rank sees it. Where rank 0
    cannot write into the first place, that is a warning if there is another.
    """

    def __init__(self, places: list[Place], group: SaveGroup, check_lock: Callable[[], None]) -> None:
        self._places = places
        self._group = group
        self._check_lock = check_lock
        for place in places:
            self._prepare(place)

    def publish(
        self, step: int, write: Callable[[Path], dict[str, FileEntry]], protect: Accept
    ) -> tuple[Path, str | None]:
        """Publishes the checkpoint of `step` and removes old ones, except the newest whose meta `protect` accepts.

        `write` writes this rank's files into a folder and returns their entries for the manifest. Returns the folder
        that the checkpoint is in, and the reason that it is not the first place, or None. Raises SaveFailedError when
        no place takes the checkpoint.
        """
        problems: list[str] = []
        own: list[str] = []
        for place in self._places:
            try:
                self._publish_in(place, step, write, protect)
                return place.folder, "; ".join(problems) or None
            except SaveFailedError as error:
                problems.append(f"{place.folder}: {error}")
                own += [f"{place.folder}: {error.own}"] if error.own is not None else []
        raise SaveFailedError("; ".join(problems), "; ".join(own) or None)

    def remove_old(self, step: int, folder: Path, protect: Accept) -> None:
        """Removes old checkpoints once more, by what became known since the one of `step` was published in `folder`."""
        if self._group.rank == 0 and folder == self._places[0].folder:
            self._remove_old(self._places[0], step, protect)

    def _prepare(self, place: Place) -> None:
        """Makes the folder, unless there is one, and makes sure that every rank sees what rank 0 writes into it."""

        def first_folder() -> Path:
            publish.prepare(place.folder)
            return publish.make_temporary_folder(place.folder, 0)

        probe: Path | None = None
        try:
            # A folder that is made and looked for, as only that shows that all nodes have the same file system mounted.
            probe = self._group.broadcast(first_folder)
            self._group.run(lambda: _check_visible(probe, place))
            self._group.broadcast(lambda: publish.remove(probe))
        except SaveFailedError as error:
            text = f"{place.folder} cannot be used for checkpoints: {error}"
            if probe is not None or place is self._places[-1]:
                raise CheckpointError(f"{text}; change {place.key}") from error
            if self._group.rank == 0:
                logger.warning("%s; those that it does not take go to %s", text, self._places[-1].key)

    def _publish_in(
        self, place: Place, step: int, write: Callable[[Path], dict[str, FileEntry]], protect: Accept
    ) -> None:
        temporary: Path | None = None
        published = False

        def begin() -> Path:
            self._check_owner(place)
            return publish.make_temporary_folder(place.folder, step)

        def write_own(temporary: Path) -> dict[str, FileEntry]:
            _check_visible(temporary, place)
            return write(temporary)

        def publish_here(entries: list[dict[str, FileEntry]]) -> None:
            nonlocal published
            # Once more: writing has taken seconds to minutes, in which another run may have taken the folder over.
            self._check_owner(place)
            publish.publish(folder, step, {name: entry for own in entries for name, entry in own.items()})
            self._remove_old(place, step, protect)
            published = True

        try:
            temporary = folder = self._group.broadcast(begin)
            self._group.agree(lambda: write_own(folder), publish_here)
        except Exception as error:
            if published:  # on rank 0 the save is good from then on, also where the others do not know
                text = "the checkpoint of step %d is complete, but the ranks lost contact before all of them knew: %s"
                logger.warning(text, step, error)
                return
            if self._group.rank == 0 and temporary is not None and os.path.exists(temporary):
                publish.remove(temporary)
            raise

    def _check_owner(self, place: Place) -> None:
        """Raises LaunchError when the run folder is not this run's any more. A run folder that does not answer is a
        reason to use the fallback, and none to stay away from it."""
        try:
            self._check_lock()
        except OSError:
            if place is self._places[0]:
                raise

    def _remove_old(self, place: Place, step: int, protect: Accept) -> None:
        try:
            self._check_owner(place)
            place.retention.apply(place.folder, protect, marked_in=self._places[0].folder)
        except LaunchError:
            raise
        except Exception as error:  # whatever it is, the checkpoint is there
            logger.warning("the checkpoint of step %d is saved, but old ones could not be removed: %s", step, error)


def _check_visible(path: Path, place: Place) -> None:
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}, which rank 0 has made, is not there on this rank's node; {place.key} must be on a file system "
            "that all nodes share"
        )
