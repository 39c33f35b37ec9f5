"""Files at an address such as `s3://bucket/folder`, by fsspec: listed, read, written and hashed; and copies of them.

fsspec and the package of the scheme are optional. Credentials come from where these packages look for them: environment
variables, configuration files, the role of the machine. An address has none, and the texts of errors are cleared of
them, because texts end in logs and reports.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from moba_train.checkpoint.files import in_threads
from moba_train.checkpoint.manifest import MANIFEST, STEP_FOLDER, FileEntry
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.config.base import Section
from moba_train.config.explain import no_credentials
from moba_train.errors import CheckpointError
from moba_train.output_files import make_folder, new_file, open_to_change, temporary_path, write_atomically

SCHEMES = {"s3": "s3fs>=2025.9", "gs": "gcsfs", "file": "fsspec"}
"""The package that each scheme needs. Without a bound, pip may take an s3fs of 2020."""
CACHE = "MOBA_TRAIN_CACHE"
"""Environment variable: folder of the copies that `local_copy` makes; default: ~/.cache/moba_train."""

THREADS = 4
"""Files that are copied at a time."""
_BLOCK_BYTES = 8 << 20
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
"""Characters; a shorter value may be part of any word."""
_S3 = {"connect_timeout": 20, "read_timeout": 60, "retries": {"mode": "standard", "max_attempts": 4}}
"""Settings of botocore: seconds, and attempts of a single request."""


class StorageError(CheckpointError):
    """A store refuses, does not answer, or does not hold what it should."""

    may_pass = True


class RemoteFile(NamedTuple):
    """A file as its store lists it."""

    size: int
    """Bytes."""
    version: str
    """Changes with the content: an etag, or the time of the last change."""


def address_problem(address: str) -> str | None:
    """Reason why `address` is none of a store, in words that do not repeat what may be a secret; None if it is one."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in SCHEMES:
        return f"has no known scheme; allowed: {', '.join(f'{name}://...' for name in SCHEMES)}"
    try:
        no_credentials(address)
    except ValueError as error:
        return str(error)
    if not rest.strip("/") or ".." in rest.split("/"):
        return "names no folder; allowed: a bucket and a folder in it, such as s3://bucket/run"
    if scheme == "file" and not rest.startswith("/"):
        return "is not absolute; allowed: file:///folder"
    return None


class Address(Section):
    """Place of checkpoints elsewhere."""

    address: str = Field(
        description="s3://BUCKET/FOLDER (`pip install 's3fs>=2025.9'`), gs://BUCKET/FOLDER (gcsfs) or file:///FOLDER; "
        "credentials come from the environment or the files that the store's package reads. The address alone is short "
        "for the section",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_short_form(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if (problem := address_problem(address)) is not None:
            raise ValueError(problem)
        return address.rstrip("/")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(core_schema), {"type": "string"}]}


def missing_package(address: str) -> str:
    """Sentence with the command that installs the package that `address` needs; empty if it is installed."""
    wanted = SCHEMES[address.partition("://")[0]]
    package = wanted.partition(">")[0]
    if find_spec("fsspec") is not None and find_spec(package) is not None:
        return ""
    return f"given {address}, but the package {package} is not installed; pip install {shlex.quote(wanted)}"


class RemoteFolder:
    """A folder of a store. Names are relative to it. Every method raises StorageError when the store refuses."""

    def __init__(self, address: str) -> None:
        if (problem := address_problem(address)) is not None:
            named = "an address" if re.search("[?#@]", address) else address  # not what may be a secret
            raise StorageError(f"{named} {problem}")
        if text := missing_package(address):
            raise StorageError(text)
        import fsspec

        self.address = address.rstrip("/")
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        with self._told(""):
            self._store, self._root = fsspec.core.url_to_fs(
                self.address, **options, **({"config_kwargs": _S3} if address.startswith("s3:") else {})
            )

    def files(self, folder: str = "") -> dict[str, RemoteFile]:
        """The files below a folder, by name; of an address that is a file, that one, by its name without folders. None
        where there is nothing. Raises StorageError for a name that leads out of the folder."""
        base = f"{self._root}/{folder}".rstrip("/")
        with self._told(folder):
            try:
                found = self._store.find(base, detail=True)
            except FileNotFoundError:
                return {}
        files = {}
        for path, facts in found.items():
            name = PurePosixPath(path).name if path == base else path.removeprefix(f"{base}/")
            if not name or name.startswith("/") or ".." in name.split("/"):
                raise StorageError(f"{self.address} holds a file {name!r}; allowed: names of files below it")
            version = next((facts[key] for key in ("ETag", "etag", "mtime") if facts.get(key)), "")
            files[name] = RemoteFile(int(facts["size"] or 0), str(version))
        return files

    def read(self, name: str, limit: int) -> bytes | None:
        """The bytes of a file of at most `limit` bytes; None where there is none."""
        with self._told(name):
            try:
                content: bytes = self._store.cat_file(self._path(name), start=0, end=limit + 1)
            except FileNotFoundError:
                return None
        if len(content) > limit:
            raise StorageError(f"{self.address}/{name}: more than {limit:,} bytes")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file."""
        with self._told(name):
            self._make_folder(name)
            if self.address.startswith("file:"):  # an object store never has a part of a file
                write_atomically(Path(self._path(name)), content)
            else:
                self._store.pipe_file(self._path(name), content)

    def put(self, path: Path, name: str) -> None:
        """Copy the file at `path` of this machine."""
        with self._told(name):
            self._make_folder(name)
            self._store.put_file(str(path), self._path(name))

    def entry(self, name: str, copy: BinaryIO | None = None) -> FileEntry:
        """Size and hash of a file, all of which is read, and written into `copy`."""
        digest = hashlib.sha256()
        size = 0
        for block in self._blocks(name):
            digest.update(block)
            size += len(block)
            if copy is not None:
                copy.write(block)
        return {"size": size, "sha256": digest.hexdigest()}

    def get(self, name: str, path: Path) -> FileEntry:
        """Copy a file to `path`, where there is none. Returns its size and hash."""
        make_folder(path.parent)
        with new_file(path) as stream:
            entry = self.entry(name, stream)
            stream.flush()
            os.fsync(stream.fileno())
        return entry

    def delete(self, *names: str) -> None:
        """Delete files, one after the other, and of a file system the folders that this empties."""
        for name in names:
            with self._told(name):
                self._store.rm_file(self._path(name))
                if self.address.startswith("file:"):
                    with suppress(OSError):  # others are in it
                        self._store.rmdir(self._path(str(PurePosixPath(name).parent)))

    def _blocks(self, name: str) -> Iterator[bytes]:
        with self._told(name), self._store.open(self._path(name), "rb", block_size=_BLOCK_BYTES) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _make_folder(self, name: str) -> None:
        if self.address.startswith("file:"):  # an object store has no folders, and may not allow to make a bucket
            self._store.makedirs(self._path(str(PurePosixPath(name).parent)), exist_ok=True)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Inside, an error of the store's package becomes a StorageError that names the file and holds no secret."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # of botocore, aiohttp, google.auth, ...
            where = f"{self.address}/{name}".rstrip("/")
            text = without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))
            raise StorageError(f"{where}: {text}") from None


def without_secrets(text: str) -> str:
    """`text` without the values of environment variables that may be secret, and without the queries of signed URLs."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name):
            text = text.replace(value, f"${name}")
    return re.sub(r"(https?://[^\s?\"']+)\?[^\s\"']+", r"\1?...", text)


def complete_steps(files: dict[str, RemoteFile]) -> dict[int, str]:
    """Names of the folders of complete checkpoints, by step: the manifest is written last."""
    folders = (name.removesuffix(f"/{MANIFEST}") for name in files if name.endswith(f"/{MANIFEST}"))
    return {int(match[1]): match[0] for match in map(STEP_FOLDER.fullmatch, folders) if match}


def local_copy(address: str) -> Path:
    """Path on this machine of a copy of the file or folder at `address`; of the newest complete checkpoint where it is
    the address of uploads. A copy is made once for a content, whatever the number of processes that ask for it.

    Raises StorageError.
    """
    remote = RemoteFolder(address)
    if address.startswith("file://"):
        path = Path(address.removeprefix("file://"))
        return latest_checkpoint(path) or path
    files = remote.files()
    name = PurePosixPath(remote.address).name
    if steps := complete_steps(files):
        name = steps[max(steps)]
        remote = RemoteFolder(f"{remote.address}/{name}")
        files = remote.files()
    if not files:
        raise StorageError(f"{address}: there is nothing")
    is_file = set(files) == {name} and remote.address.endswith(f"/{name}")
    listed = [remote.address, *(f"{name} {file.size} {file.version}" for name, file in sorted(files.items()))]
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]
    folder = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "moba_train").absolute() / digest
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    lock = open_to_change(folder / ".lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks of this machine wait for the copy
        if not target.exists():
            for leftover in folder.glob(".tmp-*"):
                shutil.rmtree(leftover)
            temporary = temporary_path(target)
            temporary.mkdir()

            def get(name: str) -> None:
                if remote.get("" if is_file else name, temporary / name)["size"] != files[name].size:
                    raise StorageError(f"{remote.address}/{name} has changed while it was copied; try again")

            in_threads(get, [*files], THREADS)
            (temporary / name if is_file else temporary).rename(target)
            if is_file:
                temporary.rmdir()
    except OSError as error:
        raise StorageError(f"{address} could not be copied into {folder} (${CACHE}): {error}") from None
    finally:
        os.close(lock)
    return target


class AtAddress:
    """Base of the stores of checkpoints at an address."""

    local_copy = staticmethod(local_copy)

    @classmethod
    def problem(cls, options: Address) -> str:
        """Reason why the address cannot be used here, with the remedy; empty: it can."""
        return missing_package(options.address)
