"""Shared counters: the sizes of a cache, for other processes to read without a lock."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from zlib import crc32

from .errors import ConfigError, IntegrityError

# word 0                 magic number
# word 1                 number of the newest state
# words 2..8, 9..15, ..  slots: number of the state, five sizes, checksum
_MAGIC: Final = int.from_bytes(b"radixkv1", "little")
_NUMBER_AT: Final = 8
_SLOTS_AT: Final = 16
_NUM_SLOTS: Final = 8
_STATE: Final = struct.Struct("=6q")
_WORD: Final = struct.Struct("=q")
_SLOT_BYTES: Final = _STATE.size + _WORD.size
_BLOCK_BYTES: Final = _SLOTS_AT + _NUM_SLOTS * _SLOT_BYTES
_MAX_NUM_TRIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class CounterValues:
    """The sizes of a cache between two of its calls, in tokens.

    Attributes:
        available_size: Free.
        evictable_size: In the tree, and needed by no running request.
        protected_size: In the tree, and needed by a running request.
        held_size: Owned by running requests outside the tree, in whole pages.
        total_size: Capacity: the sum of the others.
    """

    available_size: int
    evictable_size: int
    protected_size: int
    held_size: int
    total_size: int


class SharedCounters:
    """A block of memory in which one cache keeps its sizes for everyone to read.

    The cache writes after each of its calls; any number of processes read, and nobody
    waits for anybody. It is a sequence lock with eight slots: the writer fills the slot
    that was written longest ago, and then makes its number the newest. A reader tries
    again if its slot was overtaken meanwhile, eight writes later, and never sees half
    of a state. A writer that dies in the middle leaves the state before.

    The block is a file in memory. A `multiprocessing.shared_memory` block would be
    removed by the first reader that ends, before Python 3.13.

    Attributes:
        name: What other processes `attach` to.

    Example:
        >>> from radixkv.mem_cache import MemoryManager, RadixCache, SharedCounters
        >>> memory = MemoryManager(8, 4, max_num_requests=2, max_context_len=32)
        >>> with SharedCounters.create() as counters:
        ...     cache = RadixCache(memory, counters=counters)
        ...     with SharedCounters.attach(counters.name) as reader:  # anywhere
        ...         reader.read().available_size
        32
    """

    def __init__(self, name: str, fd: int, *, is_writer: bool) -> None:
        """Map an open file; call `create` or `attach` instead.

        Args:
            name: The name of the block.
            fd: The file; closed by `close`.
            is_writer: Whether to map it for writing.
        """
        access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
        self.name: Final = name
        self._fd = fd
        self._is_writer = is_writer
        self._is_taken = False
        self._block: mmap.mmap | None = mmap.mmap(fd, _BLOCK_BYTES, access=access)
        self._number = _word(self._block, _NUMBER_AT)

    @classmethod
    def create(cls, name: str | None = None) -> Self:
        """Make a block, all sizes 0; pass it to one cache.

        Args:
            name: A file name that no living writer uses; ``None`` picks one. What a
                writer that died left behind is taken over, with its readers.

        Raises:
            ConfigError: The name is no file name, or a living writer has it.
        """
        if name is None:
            fd, path = tempfile.mkstemp(prefix=_PREFIX, dir=_directory())
            name = Path(path).name.removeprefix(_PREFIX)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            try:
                fd = os.open(_path(name), flags, 0o600)
            except (OSError, UnicodeError) as error:  # too long, a folder, no text
                raise ConfigError(
                    f"name must be that of a file, got {name!r}: {error}"
                ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"name must be one that no living writer uses, got {name!r}"
            ) from None
        os.ftruncate(fd, _BLOCK_BYTES)
        counters = cls(name, fd, is_writer=True)
        counters.write(0, 0, 0, 0, 0)
        assert counters._block is not None  # it was just opened
        _WORD.pack_into(counters._block, 0, _MAGIC)
        return counters

    @classmethod
    def attach(cls, name: str) -> Self:
        """Open a block that another process made, for reading.

        Raises:
            ConfigError: There is none of this name.
        """
        try:
            fd = os.open(_path(name), os.O_RDONLY | os.O_NOFOLLOW)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"no shared counters are called {name!r}") from error
        try:
            is_block = os.pread(fd, _WORD.size, 0) == _WORD.pack(_MAGIC)
            is_whole = os.fstat(fd).st_size >= _BLOCK_BYTES
        except OSError:  # a folder
            is_block = is_whole = False
        if not (is_block and is_whole):
            os.close(fd)
            raise ConfigError(f"no shared counters are called {name!r}")
        return cls(name, fd, is_writer=False)

    def __enter__(self) -> Self:
        """Return the counters themselves."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the block; the writer removes it, too."""
        self.close()
        if self._is_writer:
            self.unlink()

    def take(self) -> None:
        """Take note that a cache writes here from now on.

        Raises:
            ConfigError: They can only be read, are closed, or another cache has them:
                readers would see now one and now the other.
        """
        if not self._is_writer:
            raise ConfigError("counters must come from create, got attached ones")
        if self._block is None:
            raise ConfigError("counters must be open, got closed ones")
        if self._is_taken:
            raise ConfigError("counters must belong to one cache, got a second one")
        self._is_taken = True

    def read(self) -> CounterValues:
        """Return the sizes after the newest call of the cache.

        Raises:
            ConfigError: The block is closed.
            IntegrityError: Something else has written into the block.
        """
        block = self._block
        if block is None:
            raise ConfigError("counters must be open to be read, got closed ones")
        for _ in range(_MAX_NUM_TRIES):
            number = _word(block, _NUMBER_AT)
            at = _slot_at(number)
            state = block[at : at + _STATE.size]
            # The checksum is for processors that show stores out of order.
            if crc32(state) == _word(block, at + _STATE.size):
                written, *sizes = _STATE.unpack(state)
                if written == number:
                    return CounterValues(*sizes)
        raise IntegrityError(
            f"shared counters {self.name!r}: no sound state in {_MAX_NUM_TRIES} reads"
        )

    def write(
        self, available: int, evictable: int, protected: int, held: int, total: int
    ) -> None:
        """Make these sizes the newest state; for the cache alone.

        Once closed, it writes nothing: monitoring must not stop a cache.

        Args:
            available: `CounterValues.available_size`.
            evictable: `CounterValues.evictable_size`.
            protected: `CounterValues.protected_size`.
            held: `CounterValues.held_size`.
            total: `CounterValues.total_size`.

        Raises:
            ConfigError: The block was attached, for reading.
        """
        if not self._is_writer:
            raise ConfigError("counters must come from create, got attached ones")
        block = self._block
        if block is None:
            return
        self._number = number = self._number + 1
        at = _slot_at(number)
        state = _STATE.pack(number, available, evictable, protected, held, total)
        block[at : at + _SLOT_BYTES] = state + _WORD.pack(crc32(state))
        # Last: from now on readers look there.
        _WORD.pack_into(block, _NUMBER_AT, number)

    def close(self) -> None:
        """Unmap the block. Closing twice is no fault."""
        if self._block is not None:
            self._block.close()
            self._block = None
            os.close(self._fd)

    def unlink(self) -> None:
        """Remove the name. Who is attached already keeps reading the last sizes."""
        _path(self.name).unlink(missing_ok=True)


_PREFIX: Final = "radixkv-"


def _directory() -> Path:
    in_memory = Path("/dev/shm")
    return in_memory if in_memory.is_dir() else Path(tempfile.gettempdir())


def _path(name: str) -> Path:
    if not name or "/" in name or "\0" in name:
        raise ConfigError(f"name must be a file name, got {name!r}")
    return _directory() / f"{_PREFIX}{name}"


def _slot_at(number: int) -> int:
    return _SLOTS_AT + number % _NUM_SLOTS * _SLOT_BYTES


def _word(block: mmap.mmap, at: int) -> int:
    number: int = _WORD.unpack_from(block, at)[0]
    return number
