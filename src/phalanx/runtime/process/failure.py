"""The reason for a failure in one line, and what kind of failure it was."""

import errno
from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(error: BaseException) -> str:
    """Return the root cause of an error as one line. A full disk is searched for in the entire chain of causes, since
    the code that was writing fails last and reports something else."""
    full = next((e for e in _causes(error) if isinstance(e, OSError) and e.errno in _FULL), None)
    if full is not None:
        where = f" at {full.filename}" if full.filename else ""
        return f"{full.strerror}{where}: the disk is full, or a file-size limit was reached"
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def timed_out(reason: str) -> bool:
    """Whether a failure's reason says that a peer did not arrive in time."""
    return "timed out" in reason.lower() or "timeout" in reason.lower()


def cut_off(reason: str) -> bool:
    """Whether a failure's reason says that a peer closed its end of a connection."""
    return "connection" in reason.lower() or "broken pipe" in reason.lower()


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
