"""What a launcher is to start: train.sh once on every node, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.frameworks.program import Blank, TrainingProgram
from phalanx.frameworks.subject import Subject

PORT = 29500


@dataclass(frozen=True)
class Task:
    """A job of equal nodes."""

    name: str
    """Of letters, digits and dashes, as Kubernetes takes it."""
    nodes: int
    gpus: int
    """Of a node."""
    device: str
    """The cluster's name for the GPU."""
    leaves: int
    """The fewest leaf switches that the nodes can be under; 0 where the cluster does not say."""
    blanks: tuple[Blank, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Files that every node needs in one folder, by name: train.sh among them."""


def task(x: Subject, p: TrainingProgram, files: dict[str, str]) -> Task:
    """Return the job of a program."""
    name = f"{x.model.family.replace('_', '-')}-{x.s.world}"
    size = x.cluster.ranks_per_node
    switch = [t.ranks for t in x.cluster.tiers if size < t.ranks < x.cluster.ranks]
    leaves = math.ceil(x.s.world / switch[0]) if switch else 0
    return Task(name, x.nodes, x.gpus_per_node, x.cluster.device.name, leaves, p.blanks, files)
