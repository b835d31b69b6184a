"""A rank's arena: memory that the other ranks of its host map too.

The file behind it has no name (memfd_create): peers open it through /proc while its owner lives. So nothing is left
behind however a run ends, including kill -9, and the size of /dev/shm does not matter.
"""

import errno
import mmap
import os
import secrets
import select
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

_LINE = 64  # bytes of a cache line
_HEADER = 4096  # holds the nonce, by which a peer recognises the right file
_RESERVE = 1 << 20  # bytes by which the file grows


@dataclass(frozen=True)
class Address:
    """Address by which peers find an arena on its host."""

    pid: int
    fd: int
    nonce: int


class Arena:
    """Shared memory of this process: a first-fit allocator over one mapped file. Raises OSError if the system cannot
    provide one."""

    def __init__(self) -> None:
        span = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # virtual size; only pages in use take memory
        self._fd = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        os.ftruncate(self._fd, span)
        self._bytes = memoryview(mmap.mmap(self._fd, span))
        self.words = self._bytes.cast("Q")
        self.memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self.base = self.memory.data_ptr()
        self._span, self._reserved, self._top = span, 0, 0
        self._lock = threading.Lock()  # the thread of transport p2p allocates too
        self._free: list[tuple[int, int]] = []  # (offset, size), ascending, never adjacent
        self._returned: deque[tuple[int, int]] = deque()
        self.allocate(_HEADER)
        self.words[0] = secrets.randbits(63)
        self.address = Address(os.getpid(), self._fd, self.words[0])

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes, aligned to a cache line; return their offset. Raises OSError if memory runs out."""
        with self._lock:
            if self._returned:
                self._merge()
            size = _rounded(size)
            for i, (offset, free) in enumerate(self._free):
                if free >= size:
                    self._free[i : i + 1] = [(offset + size, free - size)] if free > size else []
                    return offset
            offset = self._top
            if offset + size > self._span:
                raise OSError(errno.ENOMEM, f"allocating {size} more bytes would exceed the machine's memory")
            if offset + size > self._reserved:
                # Memory that the system cannot provide raises here rather than at first use. (Under a container's
                # lower limit the kernel decides.)
                grow = -(-(offset + size - self._reserved) // _RESERVE) * _RESERVE
                grow = min(grow, self._span - self._reserved)
                os.posix_fallocate(self._fd, self._reserved, grow)
                self._reserved += grow
            self._top += size
            return offset

    def release(self, offset: int, size: int) -> None:
        """Free what `allocate` returned. Safe to call at any moment, from the garbage collector and other threads."""
        self._returned.append((offset, _rounded(size)))  # a deque's append and popleft are atomic

    def _merge(self) -> None:
        returned: list[tuple[int, int]] = []
        while self._returned:
            returned.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, length in sorted(self._free + returned):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor (numel,) on allocated bytes, without owning them."""
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def buffer(self, numel: int, dtype: torch.dtype, zeroed: bool = True) -> Tensor:
        """Allocate a flat tensor (numel,), which is freed with the last tensor on its memory."""
        size = numel * dtype.itemsize
        offset = self.allocate(size)
        view = self._bytes[offset : offset + size]
        # Only the tensor's storage holds this view: it dies with the last tensor.
        weakref.finalize(view, self.release, offset, size).atexit = False
        tensor = torch.frombuffer(view, dtype=dtype)
        return tensor.zero_() if zeroed else tensor

    def offset(self, tensor: Tensor) -> int | None:
        """Return the offset at which a tensor's memory begins in the arena, or None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.base
        return offset if 0 <= offset < self._top else None


class ArenaNeighbour:
    """The mapped arena of another rank of this host. Raises OSError if it cannot be mapped."""

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._bytes = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        except ValueError as error:  # mmap raises it for an empty or unsuitable file
            raise OSError(str(error)) from None
        finally:
            os.close(fd)
        self.words = self._bytes.cast("Q")
        if self.words[0] != address.nonce:
            raise OSError(f"process {address.pid} is not rank {rank}")
        self.memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self.base = self.memory.data_ptr()
        self._process = select.poll()
        self._process.register(os.pidfd_open(address.pid), select.POLLIN)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor (numel,) on the peer's memory."""
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def alive(self) -> bool:
        """Whether the peer's process still runs."""
        return not self._process.poll(0)


def _rounded(size: int) -> int:
    return max(1, -(-size // _LINE)) * _LINE
