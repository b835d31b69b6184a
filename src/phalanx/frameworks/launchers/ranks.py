"""How many ranks on how many nodes launchers start, from the outermost in."""

import re
from collections.abc import Mapping
from dataclasses import replace

from phalanx.frameworks.launchers.launcher import Allocation, Launcher, OpenFile, ProgramLaunch
from phalanx.frameworks.shell.scope import is_open, plain

_MOST_RANKS = 10**7
_RANKS = {"RANK", "LOCAL_RANK"}
_COUNTS = ("nodes", "per_node", "world", "grid", "include", "hosts", "hostfile", "map_by", "sets", "slice")
"""Options from which the number of ranks follows, as programs.toml calls them."""


class RankCounts:
    """Nodes and ranks as launchers state them, from the outermost in."""

    def __init__(self, given: Allocation, environment: Mapping[str, str], open_file: OpenFile) -> None:
        self.given, self.environment, self.open_file = given, environment, open_file
        self.nodes: int | None = None
        self.per_node: int | None = None
        self.world: int | None = None
        self.gpus = given.gpus
        self.counted: dict[str, str] = {}
        self.missing: list[str] = []

    def add(self, row: Launcher, options: Mapping[str, str | bool]) -> None:
        """Add a launcher with its options. One that starts Python itself starts ranks on the nodes that launchers
        outside of it have."""
        stated: dict[str, str] = {}
        for name, value in options.items():
            if what := row.counts.get(name):
                stated[what] = plain(str(value)) if not is_open(str(value)) else ""
                if what in _COUNTS:
                    self.counted[name] = {"per_node": "ranks of a node"}.get(what, what)
        for what, variable in row.environment.items():
            if what not in stated and variable in self.environment:
                stated[what] = self.environment[variable]
        if any(name[:1] == "$" for name in options):  # which may say any count
            stated = dict.fromkeys(row.counts.values(), "") | stated
        hosts = self._hosts(stated)
        if row.allocation:
            self._allocated(stated)
        elif row.python:
            self._started(row, stated, hosts)
        elif row.counts and row.title != "torchx":
            self.nodes = hosts[0] or self.nodes or self.given.nodes
            ppr = re.match(r"ppr:(\d+):node", stated.get("map_by", ""))
            self.per_node = _count(stated.get("per_node")) or (int(ppr[1]) if ppr else None)
            slice_ = _chips(stated["slice"]) if "slice" in stated else _count(stated.get("per_set", "1"))
            sets = _product(_count(stated.get("sets", "1" if "slice" in stated else None)), slice_)
            if "nodes" in stated and "slice" in stated:  # hosts of GPUs
                sets = _product(_count(stated["nodes"]), slice_)
            self.world = _count(stated.get("world")) or sets or _product(self.nodes, self.per_node) or hosts[1]
        elif grid := re.fullmatch(r"(?:(?:\d+:)?(\d+)x)?(\d+)", stated.get("grid", "")):
            self.nodes, self.per_node = int(grid[1] or 1), int(grid[2])
            self.world = self.nodes * self.per_node

    def _allocated(self, stated: Mapping[str, str]) -> None:
        given = self.given
        self.nodes = _count(stated.get("nodes", "").partition("-")[0]) or given.nodes
        self.gpus = _gpus(stated.get("gpus")) or self.gpus
        self.per_node = _count(stated.get("per_node")) or given.per_node
        self.world = _count(stated.get("world")) or _product(self.nodes, self.per_node) or given.tasks
        if self.world is None and "per_node" not in stated and "world" not in stated:
            self.world = self.nodes  # one task a node
        if self.world and self.nodes and self.per_node is None and self.world % self.nodes == 0:
            self.per_node = self.world // self.nodes

    def _started(self, row: Launcher, stated: Mapping[str, str], hosts: tuple[int | None, int | None]) -> None:
        around = self.nodes or self.given.nodes
        nodes = stated.get("nodes")
        elastic = re.fullmatch(r"(\d+):(\d+)", nodes or "")
        if elastic:
            self.nodes = int(elastic[2])
        elif nodes is not None:
            self.nodes = _count(nodes) or around
        else:
            self.nodes = hosts[0] or row.node_default
        written = stated.get("per_node")
        visible = _visible(self.environment.get("CUDA_VISIBLE_DEVICES", ""))
        if written in ("gpu", "auto") or (written is None and row.per_node_default is None):
            each = hosts[1] // (hosts[0] or 1) if hosts[1] else None
            self.per_node = each or visible or self.gpus
        else:
            self.per_node = row.per_node_default if written is None else _count(written) or self.gpus
        self.world = _product(self.nodes, self.per_node)
        if "world" in row.counts.values():  # it counts all ranks, or leaves them to its file
            by_nodes = self.world if row.node_default else None
            self.world = _count(stated.get("world")) if "world" in stated else by_nodes
            self.nodes = _count(stated.get("nodes")) if "nodes" in stated else None
            self.per_node = self.world // self.nodes if self.world and self.nodes else None

    def _hosts(self, stated: Mapping[str, str]) -> tuple[int | None, int | None]:
        """Return the numbers of hosts and of slots on them, from a list, a file or a filter of hosts; None:
        unknown."""
        if text := stated.get("include"):
            places = [part for part in text.split("@") if part]
            slots = [len(p.partition(":")[2].split(",")) if ":" in p else 0 for p in places]
            return len(places), sum(slots) if all(slots) else None
        if name := stated.get("hostfile"):
            text = self.open_file(name) or ""
            given, batch = self.given, self.given.by.startswith("#")
            if not text and (batch or not given.nodes):  # an operator writes the list of its own pods
                self.missing.append(name)
            if not text and given.nodes:
                return given.nodes, _product(given.nodes, given.gpus if batch else given.per_node or given.gpus)
            lines = [line.split("#")[0].split() for line in text.splitlines()]
            lines = [line for line in lines if line]
            slots = [int(m[1]) if (m := re.search(r"slots=(\d{1,6})", " ".join(line))) else 0 for line in lines]
            return (len(lines), sum(slots) if all(slots) else None) if lines else (None, None)
        if text := stated.get("hosts"):
            parts = [part for part in text.split(",") if part]
            slots = [int(p.rpartition(":")[2]) if re.search(r":\d{1,6}$", p) else 1 for p in parts]
            return len(parts), sum(slots)
        return None, None

    def result(self, started: ProgramLaunch) -> ProgramLaunch:
        """Return a launch with its numbers of nodes and ranks; without a launcher these are from the variables that
        the process is given (WORLD_SIZE)."""
        if not started.launchers and "RANK" in self.environment:
            self.world = _count(self.environment.get("WORLD_SIZE"))
        elif self.given.nodes and self.world and not {"nodes", "world"}.intersection(self.counted.values()):
            self.counted[self.given.by] = "nodes"
        return replace(
            started,
            nodes=self.nodes,
            per_node=self.per_node,
            world=self.world,
            counted=self.counted,
            missing=tuple(self.missing),
            unranked=self.world if self._unranked(started) else None,
        )

    def _unranked(self, started: ProgramLaunch) -> bool:
        """Whether srun starts the program itself, outside of containers, whose hooks set the variables of torch's
        env:// (NVIDIA/enroot conf/hooks/extra/50-slurm-pytorch.sh), and nothing sets them."""
        hooked = any(name.startswith("container") for name in started.options)
        return started.launchers[-1:] == ("srun",) and not hooked and not _RANKS & self.environment.keys()


def _visible(text: str) -> int | None:
    """Return the number of devices in CUDA_VISIBLE_DEVICES; None where it is not set or not known."""
    parts = [part for part in plain(text).split(",") if part.strip()]
    return len(parts) if parts and all(re.fullmatch(r"\s*(\d+|GPU-.+|MIG-.+)\s*", part) for part in parts) else None


def _gpus(text: str | None) -> int | None:
    """Return the number of GPUs in Slurm's words: 8, h100:8, gpu:h100:8."""
    match = re.search(r"(?:^|:|,)(\d{1,6})(?:\(|$|,)", text or "")
    return int(match[1]) if match else None


def _chips(name: str) -> int | None:
    """Return the chips of a slice by Google's name: `v5p-128` counts two cores a chip, `v5litepod-256` and `v6e-256`
    chips, `h100-mega-80gb-8` the GPUs of a host. Source: cloud.google.com/tpu/docs, the pages of each version."""
    match = re.fullmatch(r"([a-z]\w*(?:-\w+)*)-(\d{1,6})", name)
    if match is None or match[1].startswith("tpu7"):
        return None
    return int(match[2]) // 2 if match[1] in ("v2", "v3", "v4", "v5p") else int(match[2])


def _count(text: str | None) -> int | None:
    value = int(text) if text and re.fullmatch(r"\d{1,8}", text) else 0
    return value if 0 < value <= _MOST_RANKS else None


def _product(a: int | None, b: int | None) -> int | None:
    return a * b if a and b else None
