"""Why something failed, in one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(error: BaseException) -> str:
    """What is at the bottom of it. Where a file system had no room, whatever wrote there complains last, and of
    something else."""
    full = next((e for e in _causes(error) if isinstance(e, OSError) and e.errno in _FULL), None)
    if full is not None:
        where = f" at {full.filename}" if full.filename else ""
        return f"{full.strerror}{where}: the disk is full, or the size of files is limited"
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def timed_out(reason: str) -> bool:
    """Whether it was a peer that did not come in time, in the words of whatever waited."""
    return "timed out" in reason.lower() or "timeout" in reason.lower()


def cut_off(reason: str) -> bool:
    """Whether a peer's end of a connection is gone, in the words of whatever used it."""
    return "connection" in reason.lower() or "broken pipe" in reason.lower()


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
