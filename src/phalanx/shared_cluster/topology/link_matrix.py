"""The paths between the GPUs of a host: the matrix of `nvidia-smi topo -m`, with NICs, and the tables of `rocm-smi
--showtopo`, with NUMA nodes (ROCm/rocm_smi_lib, python_smi_tools/rocm_smi.py: showHwTopology)."""

import re

from phalanx.shared_cluster.topology.gpus import KINDS, GpuTopology
from phalanx.spec.documents import without_colours
from phalanx.spec.errors import InputError

_MOST_GPUS = 256  # GPUs of a host
_LINK = re.compile(rf"X|NV\d+|{'|'.join(KINDS)}")


def read_matrix(text: str, file: str) -> GpuTopology:
    """Read the output of `nvidia-smi topo -m`; `file` names it in messages. Raises InputError."""
    lines = without_colours(text).splitlines()
    head = next(
        (i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b", line) and " X " not in f" {line} "), None
    )
    if head is None:
        raise InputError(file, None, "has no line of GPU names", "write it with: nvidia-smi topo -m > FILE")
    names = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\w+)\b", lines[head])
    gpus = [name for name in names if name.startswith("GPU")]
    if len(gpus) > _MOST_GPUS:
        raise InputError(file, len(gpus), "is more GPUs than a host has", f"at most {_MOST_GPUS} are read")
    by_name: dict[str, list[str]] = {}
    for line in lines[head + 1 :]:
        if words := line.split(maxsplit=len(names) + 1):
            by_name.setdefault(words[0], words)
    rows: list[tuple[str, ...]] = []
    for i, name in enumerate(gpus):
        cells = by_name.get(name, [])[1 : 1 + len(gpus)]
        wrong = next((c for c in cells if not _LINK.fullmatch(c)), None)
        if len(cells) < len(gpus) or wrong is not None or cells[i] != "X":
            reason = "has no complete row" if wrong is None else f"{wrong!r} is not a kind of link"
            raise InputError(file, name, reason)
        rows.append(tuple(cells))
    if any(rows[i][j] != rows[j][i] for i in range(len(rows)) for j in range(i)):
        raise InputError(file, None, "is not symmetric: two GPUs reach each other in different ways")
    # A NIC's paths are in the rows of GPUs and in its own: one may be missing, or have lost cells in a paste.
    nics = names[len(gpus) :]
    near = []
    for place, nic in enumerate(nics, len(gpus)):
        twice = [(by_name[gpu][1 + place :], by_name.get(nic, [])[1 + i :]) for i, gpu in enumerate(gpus)]
        near.append(tuple(next((c[0] for c in cells if c and c[0] in KINDS), "SYS") for cells in twice))
    return GpuTopology(tuple(rows), tuple(near), tuple(nics))


_TYPES = re.compile(r"Link Type between two GPUs.*?\n(.*?)(?=\n=|\Z)", re.S | re.I)
_NUMA = re.compile(r"GPU\[(\d+)\]\s*:\s*\(Topology\) Numa Node:\s*(-?\d+)")


def read_tables(text: str, file: str) -> GpuTopology:
    """Read the output of `rocm-smi --showtopo`; XGMI counts as one NVLink. Raises InputError."""
    table = _TYPES.search(text)
    lines = [line.split() for line in (table[1] if table else "").splitlines()]
    rows = {words[0]: words[1:] for words in lines if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0])}
    rows = {name: cells for name, cells in rows.items() if not re.fullmatch(r"GPU\d+", cells[0])}
    if not rows or len(rows) > _MOST_GPUS:
        raise InputError(file, None, "has no table of link types", "write it with: rocm-smi --showtopo > FILE")
    numa = {int(gpu): node for gpu, node in _NUMA.findall(text)}
    links: list[tuple[str, ...]] = []
    for i, (name, cells) in enumerate(rows.items()):
        if len(cells) != len(rows):
            raise InputError(
                file, name, f"has {len(cells)} links, and there are {len(rows)} GPUs", "is it cut short?"
            )
        links.append(tuple(_kind(cell, i, j, numa, file) for j, cell in enumerate(cells)))
    return GpuTopology(tuple(links), link="xgmi", lists_nics=False)


def _kind(cell: str, i: int, j: int, numa: dict[int, str], file: str) -> str:
    if i == j:
        return "X"
    if cell == "XGMI":
        return "NV1"
    if cell != "PCIE":
        raise InputError(file, cell, "is not a kind of link", "XGMI and PCIE are")
    return "NODE" if numa.get(i) == numa.get(j) else "SYS"
