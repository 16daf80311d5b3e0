"""The one seam through which every file operation of the store and of the run records goes.

Tests put an implementation of their own here to make the n-th operation fail, to let the process "die" around it, or to
record the order of operations. Nothing above this module touches the disk in any other way.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import unquote, urlsplit

from infra.addresses import has_scheme
from infra.storage.locks import lock

BLOCK_SIZE = 4 * 2**20
READ_ONLY_MODE = 0o444
READ_ONLY_ERRORS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
NO_LINKS_REMEDY = (
    "its file system has no hard links (exFAT has none): put the store on one that has them, as ext4 or NFS"
)


class StoreUnsupported(ValueError):
    """The address of a store is of a kind that this version cannot open."""


class StoreReadOnly(RuntimeError):
    """The store, or the cache of a remote one, cannot be written to."""

    def __init__(self, root: Path, place: Path, *, what: str = "store") -> None:
        super().__init__(
            f"the {what} {root} cannot be written to (at {place}): "
            f"make it writable for this user, or set PPOFLOW_{what.upper()} to a folder that is"
        )


@dataclass(frozen=True)
class Status:
    """What the file system knows of a path; symbolic links are not followed."""

    kind: Literal["file", "folder", "link", "special"]
    size: int
    device: int
    inode: int
    modified_ns: int
    changed_ns: int


class FileSystem(Protocol):
    """The file operations of the store. Each either happens or raises OSError."""

    def status(self, path: Path) -> Status | None:
        """What lies at `path`, or None."""

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted."""

    def blocks(self, path: Path) -> Iterator[bytes]:
        """The content of a file in blocks of bounded size."""

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        """Create a file (FileExistsError if something is there) with this content, not yet durable."""

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable."""

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over `target`, or a folder to a name that is free (ENOTEMPTY if it is taken), atomically."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, atomically; FileExistsError if `target` is taken."""

    def remove(self, path: Path) -> None:
        """Remove a file."""

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder."""

    def make_folder(self, folder: Path) -> None:
        """Create a folder; its parent must exist, and it may exist itself."""

    def protect(self, path: Path) -> None:
        """Make a file read-only."""

    def writable(self, folder: Path) -> bool:
        """Whether this process may create names in a folder."""

    def exclusive(self, path: Path) -> AbstractContextManager[None]:
        """Hold the lock file at `path`; the lock of a process that dies is free at once."""


class LocalFiles:
    """The real thing."""

    def status(self, path: Path) -> Status | None:
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        times = found.st_mtime_ns, found.st_ctime_ns
        return Status(_kind(found.st_mode), found.st_size, found.st_dev, found.st_ino, *times)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def blocks(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_SIZE):
                yield block

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for block in blocks:
                rest = memoryview(block)
                while rest:
                    with _naming(path):
                        rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    def sync_file(self, path: Path) -> None:
        _sync(path, os.O_RDONLY)

    def sync_folder(self, folder: Path) -> None:
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno in NO_LINKS and os.path.isfile(source) and self.writable(target.parent):
                raise StoreUnsupported(f"{target.parent}: {NO_LINKS_REMEDY}") from error
            raise

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, folder: Path) -> None:
        os.rmdir(folder)

    def make_folder(self, folder: Path) -> None:
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise

    def protect(self, path: Path) -> None:
        os.chmod(path, READ_ONLY_MODE)

    def writable(self, folder: Path) -> bool:
        return os.access(folder, os.W_OK | os.X_OK)

    @contextmanager
    def exclusive(self, path: Path) -> Iterator[None]:
        # Whoever can read a file can lock it: those who may not write here have no business with it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            lock(descriptor, path)
            yield
        finally:
            os.close(descriptor)


def _kind(mode: int) -> Literal["file", "folder", "link", "special"]:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "special"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What the system refuses of a descriptor names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_root(root: str | Path) -> Path:
    """The absolute folder that a store's address (a path or a file:// uri) names."""
    if isinstance(root, Path) or not has_scheme(root):
        return Path(root).expanduser().absolute()
    address = urlsplit(root)
    if address.scheme == "s3":
        raise StoreUnsupported(
            f"store {root!r}: write s3://bucket/prefix (two slashes, small letters), or ./{root} for a folder of that "
            "name"
        )
    if address.scheme != "file":
        raise StoreUnsupported(
            f"store {root!r}: this version opens local folders, file:// uris and s3://bucket/prefix, not "
            f"{address.scheme}://; set PPOFLOW_STORE to one of these"
        )
    if "://" not in root or address.netloc not in ("", "localhost") or not address.path.startswith("/"):
        raise StoreUnsupported(f"store {root!r} names no folder of this machine: write file:///absolute/folder")
    return Path(unquote(address.path))


@contextmanager
def writing_to(root: Path, *, what: str = "store") -> Iterator[None]:
    """Turn a refusal to write at or below `root` (or to make it) into StoreReadOnly."""
    try:
        yield
    except OSError as error:
        if error.errno not in READ_ONLY_ERRORS:
            raise
        for name in (error.filename2, error.filename):
            if name is not None and (Path(name).is_relative_to(root) or root.is_relative_to(name)):
                raise StoreReadOnly(root, Path(name), what=what) from error
        raise


def make_folders(files: FileSystem, folder: Path, *, top: Path) -> None:
    """Create `folder` and what is missing above it, and make every name from `top` downwards durable.

    Names that were there already are synced too: whoever made them may have died before it could.
    """
    missing: list[Path] = []
    above = folder
    while files.status(above) is None:
        missing.append(above)
        above = above.parent
    for new in reversed(missing):
        files.make_folder(new)
    for new in reversed(missing):
        if top.is_relative_to(new) and new != top:
            files.sync_folder(new.parent)
    # Somebody else's folder may not be readable to us; then its owner answers for its names.
    with suppress(PermissionError):
        files.sync_folder(top.parent)
    steps = folder.relative_to(top).parts
    for depth in range(len(steps)):
        files.sync_folder(top.joinpath(*steps[:depth]))


def folders(files: FileSystem, place: Path, *, links: bool = False) -> list[Path]:
    """The folders in a folder, in the order of their names, and with `links` the symbolic links; none if it is gone."""
    below = [] if files.status(place) is None else [place / name for name in files.names(place)]
    kinds = ("folder", "link") if links else ("folder",)
    return [path for path in below if (status := files.status(path)) is not None and status.kind in kinds]


def tree(files: FileSystem, folder: Path) -> dict[str, Status]:
    """Everything below a folder that is not itself a folder, by relative name with slashes, in sorted order."""
    found: dict[str, Status] = {}
    for name in files.names(folder):
        status = files.status(path := folder / name)
        if status is None:
            continue
        if status.kind == "folder":
            found.update({f"{name}/{below}": entry for below, entry in tree(files, path).items()})
        else:
            found[name] = status
    return found


def remove_tree(files: FileSystem, folder: Path) -> None:
    """Remove a folder and all that is in it; links are removed, not followed."""
    for name in files.names(folder):
        status = files.status(folder / name)
        if status is not None and status.kind == "folder":
            remove_tree(files, folder / name)
        elif status is not None:
            files.remove(folder / name)
    files.remove_folder(folder)


def read_whole(files: FileSystem, path: Path) -> bytes:
    """The whole content of a small file."""
    return b"".join(files.blocks(path))
