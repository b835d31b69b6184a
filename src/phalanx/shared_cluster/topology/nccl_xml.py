"""The XML that NCCL writes to NCCL_TOPO_DUMP_FILE: CPUs with nested PCIe devices, GPUs with their NVLinks, NICs with
their speed (NVIDIA/nccl src/graph/xml.cc, src/graph/topo.cc).

A document type, which could declare entities that make a small file large, is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

from phalanx.shared_cluster.topology.gpus import GpuTopology
from phalanx.spec.errors import InputError

_SWITCH = "0x068000"
"""The PCI class of an NVSwitch, as the target of a link."""
_MOST_GPUS, _DEEPEST = 256, 64


@dataclass
class _Device:
    """A GPU or a NIC."""

    path: tuple[str, ...]
    """The CPU and PCIe devices above it, from the CPU down."""
    busid: str
    links: dict[str, int] = field(default_factory=dict)
    """Bus of a GPU -> NVLinks to it."""
    switched: int = 0
    """NVLinks to switches."""
    gbit: float = 0.0
    """Gb/s of a NIC."""
    name: str = ""
    """Of a NIC; empty: a GPU."""


def read_dump(text: str, file: str) -> GpuTopology:
    """Read a dump of NCCL's topology; `file` names it in messages. Raises InputError."""
    if re.search(r"<!(DOCTYPE|ENTITY)", text, re.I):
        raise InputError(file, None, "declares a document type, which no dump of NCCL does")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise InputError(file, None, f"is not XML ({error})", "write it with NCCL_TOPO_DUMP_FILE=FILE") from None
    devices = list(_devices(root, (), 0, file))
    gpus = [d for d in devices if not d.name]
    nics = [d for d in devices if d.name]
    if not gpus:
        reason = "names no GPU: it is for NCCL_TOPO_FILE, and NCCL adds the GPUs when it runs"
        raise InputError(file, None, reason, "give what a run with NCCL_TOPO_DUMP_FILE=FILE writes")
    if len(gpus) > _MOST_GPUS or len(nics) > _MOST_GPUS:
        raise InputError(file, len(gpus), "is not a number of GPUs that a host has", "is it NCCL's dump of one host?")
    links = tuple(tuple("X" if a is b else _link(a, b) for b in gpus) for a in gpus)
    if any(links[i][j] != links[j][i] for i in range(len(gpus)) for j in range(i)):
        raise InputError(file, None, "is not symmetric: two GPUs reach each other in different ways")
    near = tuple(tuple(_path(nic, gpu) for gpu in gpus) for nic in nics)
    rates = {nic.gbit for nic in nics if nic.gbit > 0}
    return GpuTopology(links, near, tuple(n.name for n in nics), min(rates) if rates else None)


def _devices(element: ElementTree.Element, path: tuple[str, ...], depth: int, file: str) -> Iterator[_Device]:
    """Yield the GPUs and NICs below an element. `path`: names of the CPU and PCIe devices above."""
    if depth > _DEEPEST:
        raise InputError(file, None, f"is nested more than {_DEEPEST} deep")
    for child in element:
        if child.tag == "cpu":
            yield from _devices(child, (f"cpu {child.get('numaid', '')}",), depth + 1, file)
        elif child.tag == "pci":
            yield from _devices(child, (*path, child.get("busid", "")), depth + 1, file)
        elif child.tag == "gpu":
            device = _Device(path, path[-1] if path else "")
            for link in child.iter("nvlink"):
                count = _number(link.get("count"), file)
                if link.get("tclass") == _SWITCH:
                    device.switched += int(count)
                else:
                    device.links[link.get("target", "")] = int(count)
            yield device
        elif child.tag == "nic":
            for net in child.iter("net"):
                speed = _number(net.get("speed", "0"), file) / 1000  # of Mb/s
                yield _Device(path, path[-1] if path else "", gbit=speed, name=net.get("name") or "net")


def _number(text: str | None, file: str) -> float:
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        raise InputError(file, text, "is not a count")
    return float(text)


def _link(a: _Device, b: _Device) -> str:
    if a.switched and b.switched:
        return f"NV{min(a.switched, b.switched)}"
    direct = a.links.get(b.busid, 0)
    return f"NV{direct}" if direct else _path(a, b)


def _path(a: _Device, b: _Device) -> str:
    """Return the kind of PCIe path between two devices, by the devices above both."""
    common = next(
        (i for i, (x, y) in enumerate(zip(a.path, b.path, strict=False)) if x != y), min(len(a.path), len(b.path))
    )
    if common == 0:
        return "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a.path), len(b.path)) - common <= 1 else "PXB"
