"""A directory that is complete under its name or not there, and read only after it is verified.

Written beside its final place (never in a temporary folder, which may lie on another file system),
synchronised file by file, the manifest last, and renamed. The manifest holds the size and SHA-256
of every file; the directory holds these files and no others.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from invformer.errors import CheckpointError, StorageError
from invformer.runs.strict_json import dump, parse

MANIFEST = "MANIFEST.json"
FORMAT = "invformer checkpoint"
VERSION = 1
CHECKPOINTS = "checkpoints"  # folder of a run's checkpoints
PARTIAL = ".partial-"  # begins the name of what is being written or deleted
MAX_MANIFEST = 1 << 14
NAME = re.compile(r"step-(\d{8,12})(?:-(\d{1,6}))?")
SHA256 = re.compile(r"[0-9a-f]{64}")
CHUNK = 1 << 20


class FileRecord(NamedTuple):
    """What the manifest says about one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The table of contents of one directory.

    Attributes:
        path: the directory.
        files: every other file in it.
        sha256: of the manifest itself, and so of everything in the directory.
    """

    path: Path
    files: dict[str, FileRecord]
    sha256: str

    def read(self, name: str) -> bytes:
        """The content of a file, verified.

        Raises:
            CheckpointError: it is not what the manifest says.
        """
        content = b"".join(self._chunks(name))
        if hashlib.sha256(content).hexdigest() != self.files[name].sha256:
            self._refuse(name)
        return content

    def verify(self) -> None:
        """Compare every file with its hash, holding one megabyte at a time.

        Raises:
            CheckpointError: a file is not what the manifest says.
        """
        for name, record in self.files.items():
            digest = hashlib.sha256()
            for chunk in self._chunks(name):
                digest.update(chunk)
            if digest.hexdigest() != record.sha256:
                self._refuse(name)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """A file piece by piece, exactly as long as the manifest says."""
        left = self.files[name].size
        with open_regular(self.path / name) as file:
            if os.fstat(file.fileno()).st_size != left:
                self._refuse(name)
            while chunk := file.read(min(CHUNK, left)):
                left -= len(chunk)
                yield chunk
        if left:
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise CheckpointError(
            f"{self.path}: {name} is damaged or was changed (size or SHA-256 differ from "
            f"{MANIFEST})"
        )


def write_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Make a directory of files with a manifest: complete and on the disk, or not at all.

    Args:
        target: its path; nothing is there yet.
        files: content by name.

    Raises:
        StorageError: it cannot be written; nothing is left of it.
    """
    partial = target.with_name(PARTIAL + target.name)
    records = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    manifest = dump({"format": FORMAT, "version": VERSION, "files": records})
    try:
        make_folder(target.parent)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, content in {**files, MANIFEST: manifest}.items():
            write_file(partial / name, content)
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{target}: cannot be written ({error.strerror}); earlier checkpoints are kept"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Make a folder if there is none, and wait until its name is on the disk."""
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if hasattr(os, "O_DIRECTORY"):  # Windows has no such thing, and keeps them in a journal
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: Path) -> Any:
    """Open a file for reading, binary; never a link, a pipe or a device.

    Raises:
        CheckpointError: it is no regular file, or cannot be read.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path}: not a regular file")
    except OSError as error:  # a link gives "too many levels of symbolic links"
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return os.fdopen(descriptor, "rb")


def read_manifest(path: Path, limits: Mapping[str, int]) -> Manifest:
    """The manifest of a directory, once the directory holds what it lists, in the sizes it lists.

    Args:
        path: the directory.
        limits: the files that must be in it, with the size each may have, bytes.

    Raises:
        CheckpointError: no such directory, another set of files, a file beyond its limit.
    """
    where = str(path / MANIFEST)
    refuse_other_files(path, {*limits, MANIFEST})
    with open_regular(path / MANIFEST) as file:
        content = file.read(MAX_MANIFEST + 1)
    if len(content) > MAX_MANIFEST:
        raise CheckpointError(f"{where}: longer than any manifest")
    files = read_records(parse(content, where), where)
    if files.keys() != limits.keys():
        raise CheckpointError(f"{where}: lists other files than {', '.join(limits)}")
    for name, limit in limits.items():
        if files[name].size > limit:
            raise CheckpointError(f"{path}: {name} has {files[name].size} bytes, over {limit}")
    return Manifest(path, files, hashlib.sha256(content).hexdigest())


def read_records(plain: Any, where: str) -> dict[str, FileRecord]:
    """The files that a manifest lists.

    Raises:
        CheckpointError: it is no manifest of this format.
    """
    if not isinstance(plain, dict) or plain.keys() != {"format", "version", "files"}:
        raise CheckpointError(f"{where}: no manifest of a checkpoint")
    if plain["format"] != FORMAT or plain["version"] != VERSION:
        raise CheckpointError(f"{where}: of another format or version than {FORMAT} {VERSION}")
    files = {}
    for name, entry in plain["files"].items() if isinstance(plain["files"], dict) else [("", None)]:
        match entry:
            case {"bytes": size, "sha256": str(digest)} if (
                len(entry) == 2 and type(size) is int and size >= 0 and SHA256.fullmatch(digest)
            ):
                files[name] = FileRecord(size, digest)
            case _:
                raise CheckpointError(f"{where}: no size and SHA-256 for {name!r:.80}")
    return files


def refuse_other_files(path: Path, names: Collection[str]) -> None:
    """Whether a directory holds exactly some files.

    Raises:
        CheckpointError: naming one that is missing or does not belong there.
    """
    missing = set(names)
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name not in missing:
                    raise CheckpointError(f"{path}: {entry.name!r:.80} does not belong there")
                missing.remove(entry.name)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if missing:
        raise CheckpointError(f"{path}: not a checkpoint, {min(missing)} is missing")


# --- the folder that holds them ------------------------------------------------------------------


def saved_in(folder: Path) -> list[Path]:
    """The directories that are named like checkpoints, newest first; links are none."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = NAME.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            found.append(((int(name[1]), int(name[2] or 0)), path))
    return [path for _, path in sorted(found, reverse=True)]


def name_for(folder: Path, step: int) -> str:
    """``step-00001500``, or ``step-00001500-1`` where that is taken: nothing is overwritten."""
    first = f"step-{step:08d}"
    taken = [NAME.fullmatch(p.name) for p in saved_in(folder) if p.name.startswith(first)]
    serials = [int(name[2] or 0) for name in taken if name and int(name[1]) == step]
    return f"{first}-{max(serials) + 1}" if serials else first


def keep_only(folder: Path, names: Collection[str | None]) -> None:
    """Delete all other checkpoints of a folder; each loses its name before its content."""
    for path in saved_in(folder):
        if path.name not in names:
            doomed = path.with_name(PARTIAL + path.name)
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete what a killed process was writing or deleting."""
    for path in folder.glob(PARTIAL + "*") if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
