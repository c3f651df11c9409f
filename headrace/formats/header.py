"""HeaderReader: a file's first bytes, read in order with pread, every length checked before it is
read."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import HeadraceError

_BUFFER_BYTES = 1 << 20


def _kind(mode: int) -> str:
    """What stands in the place of a file, and what to do."""
    if stat.S_ISDIR(mode):
        return "a directory; give a file in it"
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return "a pipe; write what comes out of it to a file and give that"
    return "a device; give a file"


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """(file descriptor, size in bytes) of a regular file, closed at the end of the with block."""
    try:
        # A FIFO would block in open, a device has no size.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise HeadraceError(f"{path}: expected a regular file, found {_kind(mode)}")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise HeadraceError(f"{path}: no such file") from None
    except OSError as e:
        raise HeadraceError(f"{path}: cannot open: {e.strerror}") from None
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills `buffer` (bytes) from the file at offset; a failed or short read raises
    HeadraceError."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as e:
            raise HeadraceError(f"{path}: read at offset {offset + done}: {e.strerror}") from None
        if not count:
            raise HeadraceError(f"{path}: truncated: expected {len(buffer)} bytes at offset {offset}, found {done}")
        done += count


def read_at(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    """nbytes at offset, as read_into."""
    data = bytearray(nbytes)
    read_into(fd, memoryview(data), offset, path)
    return bytes(data)


def read_small(path: Path, limit_bytes: int) -> bytes:
    """A whole file that must not be larger than limit_bytes."""
    with opened(path) as (fd, size):
        if size > limit_bytes:
            raise HeadraceError(f"{path}: expected at most {limit_bytes} bytes, found {size}")
        return read_at(fd, size, 0, path)


class HeaderReader:
    """Takes little-endian values one after another from the file's first limit_bytes; reads ahead
    1 MiB."""

    def __init__(self, path: Path, fd: int, size: int, limit_bytes: int):
        self.path = path
        self.size = size
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._buffer = b""
        self._base = 0  # file offset of the buffer
        self._at = 0  # next byte in the buffer

    @property
    def offset(self) -> int:
        return self._base + self._at

    @property
    def remaining(self) -> int:
        return self.size - self.offset

    def take(self, nbytes: int, what: str) -> bytes:
        at, end = self._at, self._at + nbytes
        if end > len(self._buffer):
            self._refill(nbytes, what)
            at, end = 0, nbytes
        self._at = end
        return self._buffer[at:end]

    def _refill(self, nbytes: int, what: str) -> None:
        """Makes the buffer begin at the current offset and hold at least nbytes."""
        if nbytes > self.remaining:
            raise HeadraceError(
                f"{self.path}: truncated: {what} at offset {self.offset} needs {nbytes} bytes, the file ends after "
                f"{self.remaining}"
            )
        if self.offset + nbytes > self._limit_bytes:
            raise HeadraceError(
                f"{self.path}: {what} at offset {self.offset} needs {nbytes} bytes: the header is larger than "
                f"{self._limit_bytes} bytes"
            )
        count = min(max(nbytes, _BUFFER_BYTES), self.remaining)
        buffer = read_at(self._fd, count, self.offset, self.path)
        self._base, self._at, self._buffer = self.offset, 0, buffer

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def unpack(self, fmt: struct.Struct, what: str) -> object:
        return fmt.unpack(self.take(fmt.size, what))[0]

    def text(self, nbytes: int, what: str) -> str:
        at = self.offset
        try:
            return self.take(nbytes, what).decode()
        except UnicodeDecodeError:
            raise HeadraceError(f"{self.path}: {what} at offset {at} is not valid UTF-8") from None

    def string(self, what: str) -> str:
        """A u64 length and as many bytes of UTF-8."""
        return self.text(self.u64(what), what)

    def strings(self, count: int, what: str) -> list[str]:
        """Many at once: a vocabulary has 300,000, so those in the buffer take no calls."""
        length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        while len(strings) < count:
            buffer, at = self._buffer, self._at
            while len(strings) < count and at + 8 <= len(buffer):
                end = at + 8 + length(buffer, at)[0]
                if end > len(buffer):
                    break
                try:
                    strings.append(buffer[at + 8 : end].decode())
                except UnicodeDecodeError:
                    break  # told by string() below
                at = end
            self._at = at
            if len(strings) < count:
                strings.append(self.string(what))
        return strings
