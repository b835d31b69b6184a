"""Reads pickles of plain values (dict, list, tuple, str, bytes, int, float, bool, None), and nothing else.

A pickle is a program; pickle.load runs whatever it names. This reads the opcodes that plain values need and refuses
the others, so that a stranger's file can do no more than be large. Snapshots of torch.cuda.memory are such.
Reference: Python's Lib/pickletools.py.
"""

import struct
from typing import Any

from phalanx.spec.errors import InputError

_MARK = object()
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_LENGTHS = {b"\x8c": "B", b"X": "<I", b"\x8d": "<Q", b"C": "B", b"B": "<I", b"\x8e": "<Q"}
_NUMBERS = {b"J": "<i", b"K": "B", b"M": "<H", b"G": ">d"}
_TEXT = (b"\x8c", b"X", b"\x8d")
_REFUSED = {b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"\x81": "NEWOBJ", b"i": "INST"}


def load(data: bytes, name: str) -> Any:
    """Return the value of a pickle. Raises InputError for an opcode beyond plain values, and a damaged pickle."""
    try:
        return _load(data)
    except InputError as error:
        raise InputError(
            "snapshot", name, error.reason, "expected what torch.cuda.memory._dump_snapshot writes"
        ) from None
    except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError, AttributeError, MemoryError):
        raise InputError("snapshot", name, "is cut or damaged", "write it again") from None


def _load(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return value

    def since_mark() -> list[Any]:
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
        items = stack[place + 1 :]
        del stack[place:]
        return items

    while True:
        code, at = data[at : at + 1], at + 1
        if code in _NUMBERS:
            stack.append(take(_NUMBERS[code]))
        elif code in _LENGTHS:
            size = take(_LENGTHS[code])
            content, at = data[at : at + size], at + size
            if len(content) < size:
                raise IndexError
            stack.append(content.decode("utf-8", "surrogatepass") if code in _TEXT else content)
        elif code == b"\x94":  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code in (b"q", b"r"):  # BINPUT, LONG_BINPUT
            memo[take("B" if code == b"q" else "<I")] = stack[-1]
        elif code in (b"h", b"j"):  # BINGET, LONG_BINGET
            stack.append(memo[take("B" if code == b"h" else "<I")])
        elif code == b"(":
            stack.append(_MARK)
        elif code in (b"u", b"s"):  # SETITEMS, SETITEM
            items = since_mark() if code == b"u" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif code in (b"e", b"a"):  # APPENDS, APPEND
            items = since_mark() if code == b"e" else [stack.pop()]
            stack[-1].extend(items)
        elif code in (b"}", b"]", b")"):
            stack.append({} if code == b"}" else [] if code == b"]" else ())
        elif code in (b"\x85", b"\x86", b"\x87"):  # TUPLE1 to TUPLE3
            count = code[0] - 0x84
            stack[-count:] = [tuple(stack[-count:])]
        elif code == b"t":
            stack.append(tuple(since_mark()))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == b"\x8a":  # LONG1
            size = take("B")
            content, at = data[at : at + size], at + size
            stack.append(int.from_bytes(content, "little", signed=True))
        elif code in (b"\x80", b"\x95"):  # PROTO, FRAME
            take("B" if code == b"\x80" else "<Q")
        elif code == b".":
            return stack.pop()
        elif not code:
            raise IndexError
        else:
            said = _REFUSED.get(code, f"0x{code.hex()}")
            raise InputError("snapshot", None, f"holds more than plain values (opcode {said}), which is not run")
