"""Slurm's host lists: `node[01-04,07],login` for node01 node02 node03 node04 node07 login.

Grammar: names separated by commas; brackets hold numbers and ranges, with leading zeros kept (slurm, hostlist.c).

Names are written into launch scripts, so only names that hosts and switches can have are accepted: letters, digits,
`_`, `-` and `.` (RFC 1123, with the `_` of Slurm), and nothing that a shell would run.
"""

import re
from collections.abc import Iterable

from phalanx.spec.errors import InputError

_MOST_HOSTS = 2**17
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


def require_host_name(name: str, field: str) -> str:
    """Return a name that a host or switch can have; `field` names it in messages. Raises InputError for any other."""
    if not _NAME.fullmatch(name):
        raise InputError(field, name, "is not the name of a host", "letters, digits, `_`, `-` and `.`")
    return name


def expand(text: str, field: str = "hosts") -> list[str]:
    """Return the names of a host list, in order. Raises InputError."""
    if text.count("[") != text.count("]") or re.search(r"\[[^\]]*\[", text):
        raise InputError(field, text, "has a bracket without its partner", "write node[01-04]")
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names += [require_host_name(name, field) for name in _expanded(part.strip(), field)]
        if len(names) > _MOST_HOSTS:
            raise InputError(field, text, f"has more than {_MOST_HOSTS:,} names")
    return names


def _expanded(text: str, field: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\]]*)\](.*)", text)
    if match is None:
        return [text] if text else []
    head, inside, tail = match.groups()
    numbers: list[str] = []
    for piece in inside.split(","):
        bounds = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", piece)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise InputError(field, text, f"{piece!r} is not a range of numbers", "write node[01-04]")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if last - first > _MOST_HOSTS:
            raise InputError(field, text, f"has more than {_MOST_HOSTS:,} names")
        numbers += [str(n).zfill(len(bounds[1])) for n in range(first, last + 1)]
        if len(numbers) > _MOST_HOSTS:
            raise InputError(field, text, f"has more than {_MOST_HOSTS:,} names")
    tails = _expanded(tail, field) or [""]
    if len(numbers) * len(tails) > _MOST_HOSTS:
        raise InputError(field, text, f"has more than {_MOST_HOSTS:,} names")
    return [f"{head}{number}{rest}" for number in numbers for rest in tails]


def compress(names: Iterable[str]) -> str:
    """Return names as a host list, in their order: consecutive numbers at the end of names become a range."""
    runs: list[tuple[str, str, str]] = []  # (head, first, last)
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        head, number = match.groups() if match else (name, "")
        if runs and number and runs[-1][0] == head and runs[-1][2]:
            before = runs[-1][2]
            if int(number) == int(before) + 1 and number == str(int(before) + 1).zfill(len(before)):
                runs[-1] = (head, runs[-1][1], number)
                continue
        runs.append((head, number, number))
    parts: list[str] = []
    i = 0
    while i < len(runs):
        head, same = runs[i][0], [runs[i]]
        while runs[i][1] and i + 1 < len(runs) and runs[i + 1][0] == head and runs[i + 1][1]:
            i += 1
            same.append(runs[i])
        inside = ",".join(first if first == last else f"{first}-{last}" for _, first, last in same)
        parts.append(f"{head}{inside}" if len(same) == 1 and same[0][1] == same[0][2] else f"{head}[{inside}]")
        i += 1
    return ",".join(parts)
