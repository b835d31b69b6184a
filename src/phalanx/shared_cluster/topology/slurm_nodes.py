"""The nodes of Slurm's lists: `scontrol show nodes`, and `sinfo` in its own formats and in any of `-o` and `-O`.

    NodeName=g1 ... Gres=gpu:h100:8(S:0-1) ... State=MIXED+PLANNED ...
    CfgTRES=cpu=224,gres/gpu=8   AllocTRES=cpu=56,gres/gpu=4
    GresUsed=gpu:h100:4(IDX:0-3)                                 with `scontrol -d`: which of them

    PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST            sinfo: neither how many GPUs nor how many are used
    gpu*         up 1-00:00:00      2    mix g[1-2]
    NODELIST  GRES                GRES_USED             STATE    sinfo -N -O NodeList,Gres,GresUsed,StateLong
    g1        gpu:h100:8(S:0-1)   gpu:h100:4(IDX:0-3)   mixed

States are in scontrol(1), joined by `+`, and in sinfo(1), short or with a sign after them:
`*` a node that does not respond, `$` a reservation for maintenance, `@` and `^` a reboot, `!` and `%` one that is
powered down; `~` and `#` are powered up for a job, `-` is planned for one.

AllocTRES counts GPUs only where slurm.conf's AccountingStorageTRES tracks gres/gpu, and then CfgTRES has them too;
elsewhere only the state is known. An allocated node has no CPU left, so no job gets its GPUs.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from phalanx.shared_cluster.topology.hostlist import expand, require_host_name
from phalanx.shared_cluster.topology.scheduled_nodes import REMEDY, UNKNOWN_COUNT, ScheduledNode
from phalanx.spec.errors import InputError

_TAKES_JOBS = frozenset(
    ["IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "CLOUD", "DYNAMIC_NORM", "POWERED_DOWN", "POWERING_UP"]
)
_SHORT = {"MIX": "MIXED", "ALLOC": "ALLOCATED", "COMP": "COMPLETING", "PLND": "PLANNED"}
_COUNT = re.compile(r"gpu(?::[\w.-]+)?:(\d{1,4})(?![\w.-])")
_USED = re.compile(r"gpu[^,(]*\(IDX:([\d,-]+)\)")
_WITHOUT = re.compile(r"(?:^|[^a-z])(?:cpu|login|bigmem|highmem|himem|largemem)(?!.*gpu)", re.I)
"""Names of nodes or partitions without GPUs."""
_MOST_GPUS = 1024
"""GPUs of a node."""
_NAMES = ("NODELIST", "HOSTNAMES")
_HEADER = re.compile(r"^(?=.*\b(NODELIST|HOSTNAMES)\b)(?=.*\b(STATE|NODES\(A/I)).*$", re.M)


def is_sinfo(text: str) -> bool:
    """Whether a text has the header of `sinfo`'s table."""
    return bool(_HEADER.search(text))


def scontrol_nodes(text: str, file: str) -> list[ScheduledNode]:
    """Read the nodes of `scontrol show nodes`, each once. Raises InputError for a name that no host can have."""
    nodes: dict[str, ScheduledNode] = {}
    for record in re.split(r"^(?=NodeName=)", text, flags=re.M):
        if (name := re.match(r"NodeName=(\S+)", record)) and name[1] not in nodes:
            nodes[require_host_name(name[1], file)] = _node(name[1], record)
    return list(nodes.values())


def _node(name: str, record: str) -> ScheduledNode:
    fields = {key: value for key, value in re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", record)}
    configured, allocated = fields.get("CfgTRES", ""), fields.get("AllocTRES", "")
    gpus, which = _gpus(fields.get("Gres", "")) or _tres(configured), _gpu_numbers(fields.get("GresUsed", ""))
    used = None
    if _COUNT.search(fields.get("GresUsed", "")):
        used = _gpus(fields["GresUsed"])
    elif "gres/gpu" in allocated or (allocated and "gres/gpu" in configured):
        used = _tres(allocated)
    state, cpus = fields.get("State", "UNKNOWN"), fields.get("CPUAlloc", "0")
    by_state = _used_gpus(state)
    if cpus != "0":
        by_state = UNKNOWN_COUNT if cpus == fields.get("CPUTot") else by_state or None
    node = _scheduled_node(name, state, by_state, gpus, used, which)
    kind, partitions = _kind(fields.get("Gres", "")), fields.get("Partitions", "")
    return replace(node, kind=kind, partitions=frozenset(partitions.split(",")) - {""})


def _scheduled_node(
    name: str, state: str, by_state: int | None, gpus: int | None, used: int | None, which: frozenset[int]
) -> ScheduledNode:
    """Return a node in a state. `by_state`: its GPUs in use by the state, `used`: by the list; None: unknown. A node
    in the state of a full one is closed even if the list has free GPUs."""
    closed = _closed_reason(state)
    if by_state == UNKNOWN_COUNT and used is not None and used < (gpus or 0):
        closed = closed or f"State={state}, so that no CPU is free"
    used = by_state if used is None else used
    return ScheduledNode(name, closed, gpus, used, which if len(which) == used else None)


def sinfo_nodes(text: str, file: str) -> list[ScheduledNode]:
    """Read the nodes of a table of `sinfo`, each once. Raises InputError for rows that do not fit the header."""
    nodes: dict[str, ScheduledNode] = {}
    for row in _rows(text, file):
        gpus = _gpus(row["GRES"]) if "GRES" in row else None
        state, listed = row["STATE"], row.get("GRES_USED", "")
        used = _gpus(listed) if listed else None
        partitions = frozenset((row["PARTITION"].rstrip("*"),)) if "PARTITION" in row else frozenset()
        for name in expand(next(row[key] for key in _NAMES if key in row), file):
            node = _scheduled_node(name, state, _used_gpus(state), gpus, used, _gpu_numbers(listed))
            node = nodes.get(name, replace(node, kind=_kind(row.get("GRES", ""))))
            nodes[name] = replace(node, partitions=node.partitions | partitions)
    return [replace(node, gpus=0, by_name=True) if _none_by_name(node) else node for node in nodes.values()]


def _none_by_name(node: ScheduledNode) -> bool:
    """Whether the name of a node, or of all its partitions, says that it has no GPUs, and the list does not say."""
    named = bool(node.partitions) and all(map(_WITHOUT.search, node.partitions))
    return node.gpus is None and (named or bool(_WITHOUT.search(node.name)))


def _rows(text: str, file: str) -> Iterator[dict[str, str]]:
    """Yield each row as column -> cell, under the last header above it."""
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in line.split("|")] if "|" in line else line.split()
        if _HEADER.match(line):
            header = cells
            if "STATE" not in header:
                raise InputError(file, line.strip(), "counts the nodes of each state, and does not name them", REMEDY)
        elif header and cells:
            if len(cells) < len(header) or ("REASON" not in header and len(cells) > len(header)):
                reason = f"line {number} has not the columns of the header"
                raise InputError(file, line.strip()[:60], reason, f"cells that run together need more room: {REMEDY}")
            yield dict(zip(header, cells, strict=False))


def _used_gpus(state: str) -> int | None:
    """Return the GPUs in use on a node in a state: 0, UNKNOWN_COUNT, or None if the state does not say."""
    bare = _bare(state)
    if "COMPLETING" in state.upper() and bare != "ALLOCATED":
        return None
    return 0 if bare in ("IDLE", "PLANNED") else UNKNOWN_COUNT if bare == "ALLOCATED" else None


def _closed_reason(state: str) -> str:
    """Return why a node in a state takes no jobs; empty: it takes jobs."""
    parts = [_SHORT.get(part, part) for part in re.findall(r"[A-Z_]+", state.upper())]
    return "" if set(parts) <= _TAKES_JOBS and not re.search(r"[*$@^!%]", state) else f"State={state}"


def _bare(state: str) -> str:
    word = re.sub(r"[^A-Z_].*", "", state.upper())
    return _SHORT.get(word, word)


def _gpus(gres: str) -> int:
    """Return the number of GPUs in a list of generic resources: gpu:h100:8(S:0-1),nic:4."""
    return sum(map(int, _COUNT.findall(gres)))


def _kind(gres: str) -> str:
    """Return the kind of GPUs in a list of generic resources: h100 of gpu:h100:8; empty: it has none."""
    return "+".join(dict.fromkeys(re.findall(r"gpu:([A-Za-z_][\w.-]*):\d", gres)))


def _gpu_numbers(gres: str) -> frozenset[int]:
    """Return the numbers of the GPUs in use: 0 to 3 of gpu:h100:4(IDX:0-3)."""
    return frozenset(i for part in ",".join(_USED.findall(gres)).split(",") if part for i in _range(part))


def _tres(text: str) -> int:
    """Return the number of GPUs in a list of trackable resources: gres/gpu=8, or the sum over types."""
    whole = re.search(r"(?:^|,)gres/gpu=(\d{1,4})", text)
    return int(whole[1]) if whole else sum(map(int, re.findall(r"(?:^|,)gres/gpu:[^=,]*=(\d{1,4})", text)))


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first or 0), min(int(last or first or 0), _MOST_GPUS) + 1)
