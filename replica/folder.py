"""Directories of our own, opened step by step so that nobody can lead us elsewhere.

Every step is relative to the open directory above it and follows no symbolic link; what is opened
is checked for kind, owner and hard links *after* it is open, so nothing can be swapped in between.
Modes are set on the open object and not by umask, which is the user's and shared by all threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from replica.errors import ArenaError

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_PEEK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def folder_name(text: str) -> str:
    """Return a file name for any text: its harmless characters, and a hash to tell texts apart."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', text)[:40]}-{digest[:12]}"


class Folder:
    """An open directory. ``path`` is for messages; all access goes through the descriptor."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path
        info = os.fstat(descriptor)
        self.key = (info.st_dev, info.st_ino)
        """Device and inode: names the directory whatever path leads to it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def child(self, name: str, *, create: bool) -> Folder:
        """Open a directory of this user below; ``create`` makes it, mode 0700, where it is missing.

        Raises FileNotFoundError when it, or this folder itself, is gone; ArenaError when it is a
        link, no directory, or another user's.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, _DIRECTORY_MODE, dir_fd=self.descriptor)
        mode = _DIRECTORY_MODE if create else None
        opened = self._open(name, os.O_RDONLY | os.O_DIRECTORY, mode)
        return Folder(opened, f"{self.path}/{name}")

    def file(self, name: str, *, write: bool = True, create: bool = False) -> int:
        """Open a regular file of this user, as a descriptor; ``create`` makes it, mode 0600."""
        if create:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_CLOEXEC
            with contextlib.suppress(FileExistsError):
                os.close(os.open(name, flags, _FILE_MODE, dir_fd=self.descriptor))
        flags = os.O_RDWR if write else os.O_RDONLY
        return self._open(name, flags, _FILE_MODE if write else None)

    def names(self) -> list[str]:
        """List what is in the directory, sorted."""
        return sorted(os.listdir(self.descriptor))  # noqa: PTH208 - by descriptor, not by path

    def unlink(self, name: str) -> None:
        """Remove a file, or a link and not what it leads to; one that is gone is no error.

        Raises ArenaError, and removes nothing, when it is another user's.
        """
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            _check_owner(info, f"{self.path}/{name}")
            os.unlink(name, dir_fd=self.descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file its final name."""
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove_child(self, name: str) -> bool:
        """Remove an empty directory; False if it is not empty (somebody came first) or gone."""
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def leads_to(self, name: str, descriptor: int) -> bool:
        """Whether ``name`` in this directory is (still) the object that ``descriptor`` has open."""
        info = os.fstat(descriptor)
        return self.has(name, (info.st_dev, info.st_ino))

    def has(self, name: str, key: tuple[int, int]) -> bool:
        """Whether ``name`` in this directory is the object of that device and inode."""
        try:
            info = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (info.st_dev, info.st_ino) == key

    def in_place(self) -> bool:
        """Whether its path still leads to it, as far as this process may see."""
        try:
            info = Path(self.path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (info.st_dev, info.st_ino) == self.key

    def _open(self, name: str, flags: int, mode: int | None) -> int:
        peek = os.open(name, _PEEK, dir_fd=self.descriptor)
        path = f"{self.path}/{name}"
        try:
            info = os.fstat(peek)
            check_ours(info, path, directory=bool(flags & os.O_DIRECTORY))
            itself = f"/proc/self/fd/{peek}"
            if mode is not None and stat.S_IMODE(info.st_mode) != mode:
                Path(itself).chmod(mode)
            return os.open(itself, flags | os.O_CLOEXEC)
        except PermissionError as error:
            mode = stat.S_IMODE(info.st_mode)
            raise ArenaError(f"{path} has mode {mode:o} and cannot be opened: remove it") from error
        finally:
            os.close(peek)


def check_ours(info: os.stat_result, path: str, *, directory: bool) -> None:
    """Raise ArenaError unless this is a directory, or a file with one name, of the calling user."""
    if stat.S_ISLNK(info.st_mode):
        raise ArenaError(f"{path} is a symbolic link, and none is followed here: remove it")
    if not (stat.S_ISDIR(info.st_mode) if directory else stat.S_ISREG(info.st_mode)):
        expected = "a directory" if directory else "a regular file"
        raise ArenaError(f"{path} is not {expected}: remove it")
    _check_owner(info, path)
    if not directory and info.st_nlink > 1:
        raise ArenaError(f"{path} has {info.st_nlink} names, expected one: remove it")


def _check_owner(info: os.stat_result, path: str) -> None:
    if info.st_uid != os.geteuid():
        raise ArenaError(
            f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}: choose another arena_dir"
        )


def open_arena_dir(arena_dir: str | Path) -> Folder:
    """Open the directory that the user named, which may be anybody's, without following a link.

    Raises ArenaError, naming the part of the path that is missing, a link, or no directory.
    """
    path = Path(os.path.abspath(arena_dir))  # noqa: PTH100 - resolve() would follow links
    descriptor = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    at = ""
    for name in path.parts[1:]:
        at = f"{at}/{name}"
        try:
            below = _step(descriptor, name, at)
        finally:
            os.close(descriptor)
        descriptor = below
    folder = Folder(descriptor, str(path))
    try:
        _announce(folder)
    except BaseException:
        folder.close()
        raise
    return folder


def _announce(folder: Folder) -> None:
    """Open the directory by its whole path once, so that an audit hook can see, and refuse, it."""
    try:
        descriptor = os.open(folder.path, _PEEK | os.O_DIRECTORY)
    except OSError as error:
        reason = error.strerror or error
        raise ArenaError(f"arena_dir: {folder.path} cannot be opened: {reason}") from error
    try:
        if not os.path.samestat(os.fstat(descriptor), os.fstat(folder.descriptor)):
            raise ArenaError(f"arena_dir: {folder.path} was replaced while it was being opened")
    finally:
        os.close(descriptor)


def _step(descriptor: int, name: str, path: str) -> int:
    try:
        return os.open(name, _PEEK | os.O_DIRECTORY, dir_fd=descriptor)
    except FileNotFoundError as error:
        raise ArenaError(
            f"arena_dir: {path} does not exist: mount a tmpfs there, or make the directory on one"
        ) from error
    except NotADirectoryError as error:
        if Path(path).is_symlink():
            raise ArenaError(
                f"arena_dir: {path} is a symbolic link, and none is followed: "
                f"give the real path, {os.path.realpath(path)}"
            ) from error
        raise ArenaError(f"arena_dir: {path} is not a directory") from error
    except OSError as error:
        raise ArenaError(f"arena_dir: {path} cannot be opened: {error.strerror}") from error


def user_folder(base: Folder, *, create: bool) -> Folder:
    """Open this user's directory in an arena_dir: ``planaria-UID``."""
    return base.child(f"planaria-{os.geteuid()}", create=create)
