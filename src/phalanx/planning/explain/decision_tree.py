"""The usual decision tree for choosing a strategy, as data: every branch is a question about numbers, every leaf a
rule. The tree gives a first guess with reasons; the search gives the answer. `walk` answers the questions for a job
and returns the path; `RULES` in textbook/case_studies.py prices the leaves. N: parameters, 16 N bytes of
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.spec import ModelSpec

_STATE = 16
_ROOM = 0.6
"""Share of a device's memory for state, leaving the rest to activations."""
_FAST = 20e9
"""Bytes/s of a rank between nodes, in one direction, above which ZeRO-3's gathers can be hidden: InfiniBand."""
_LONG = 32_768
"""Sequence length above which a sequence is split over ranks."""
_LARGE = 100e9


@dataclass(frozen=True)
class Facts:
    """Facts about a training that the questions read."""

    parameters: float
    experts: int
    seq: int
    sequences: float
    """Sequences of a step for each GPU."""
    gpus: int
    node: int
    """Ranks joined by the fastest links."""
    usable_bytes: int
    network_bytes_per_s: float
    """Bytes/s of a rank between nodes, in one direction."""
    sites: bool
    """Whether a tier beyond the nodes' is ten times slower still."""
    serving: bool = False

    @property
    def state(self) -> float:
        """Bytes of state, unsharded."""
        return _STATE * self.parameters


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree: what to do."""

    rule: str
    line: str
    """Fields of a strategy, as a pattern."""


@dataclass(frozen=True)
class Branch:
    """A question, and where yes and no lead."""

    question: str
    words: tuple[str, str]
    """Meaning of yes and no in a few words; empty if obvious."""
    holds: Callable[[Facts], bool]
    yes: Node
    no: Node


Node = Branch | Leaf

_SERVING = Branch(
    "Does it fit one GPU (weights alone, 2 N bytes, within 60 %)?",
    ("fits one GPU", "more than one GPU"),
    lambda f: 2 * f.parameters <= _ROOM * f.usable_bytes,
    Leaf("throughput: replicas, one a GPU; latency: tensor parallelism inside a node as long as it pays", "replicas"),
    Branch(
        "Does it fit one node?",
        ("fits one node", "more than one node"),
        lambda f: 2 * f.parameters <= _ROOM * f.usable_bytes * f.node,
        Leaf("tensor parallelism inside a node, replicas of that", "tp=T"),
        Leaf(
            "a pipeline between nodes, tensor parallelism inside: for capacity, as it lowers no latency", "tp=T,pp=P"
        ),
    ),
)
_DENSE_MANY = Branch(
    "Are links between nodes fast (20 GB/s a GPU and direction, InfiniBand)?",
    ("fast network", "slow network"),
    lambda f: f.network_bytes_per_s >= _FAST,
    Branch(
        "Over 100 B parameters?",
        ("over 100 B", "under 100 B"),
        lambda f: f.parameters > _LARGE,
        Leaf(
            "tensor parallelism inside a node, a pipeline across nodes, the rest data parallelism with ZeRO-1",
            "dp,zero=1,tp=T,sp=1,pp=P",
        ),
        Branch(
            "Is there at least one sequence for each GPU?",
            ("a sequence for each GPU", "fewer sequences than GPUs"),
            lambda f: f.sequences >= 1,
            Leaf("ZeRO-3 (FSDP) or ZeRO-1 with what fits, over all GPUs or inside groups (HSDP)", "dp,zero=3"),
            Leaf("tensor parallelism inside a node, data parallelism with ZeRO-1 across", "dp,zero=1,tp=T,sp=1"),
        ),
    ),
    Leaf(
        "tensor parallelism or ZeRO-3 inside a node; a pipeline or replicas (HSDP) across nodes",
        "tp=T,pp=P or zero=3,shard=T",
    ),
)
_SEVERAL: Node = Branch(
    "Across sites (a tier of links ten times slower than the network)?",
    ("across sites", "one site"),
    lambda f: f.sites,
    Leaf("a pipeline between sites, which sends least; inside each as on one", "pp=P"),
    Branch(
        "Are there experts?",
        ("experts", "dense"),
        lambda f: f.experts > 1,
        Branch(
            "Over 100 B parameters?",
            ("over 100 B", "under 100 B"),
            lambda f: f.parameters > _LARGE,
            Leaf("expert parallelism inside a node or few nodes, a pipeline across, ZeRO-1", "dp,zero=1,ep=E,pp=P"),
            Leaf("expert parallelism inside a node, data parallelism with ZeRO-1", "dp,zero=1,ep=E"),
        ),
        Branch(
            "Sequences of 32,768 tokens or more?",
            ("long sequences", "short sequences"),
            lambda f: f.seq >= _LONG,
            Leaf("context parallelism, with tensor parallelism inside a node and ZeRO-1", "dp,zero=1,tp=T,cp=C"),
            Branch(
                "Does the state, 16 N bytes, fit one GPU (within 60 %)?",
                ("state fits one GPU", "state is more than one GPU"),
                lambda f: f.state <= _ROOM * f.usable_bytes,
                Leaf("data parallelism (DDP), ZeRO-1 as it costs nothing", "dp"),
                Branch(
                    "One node?",
                    ("one node", "several nodes"),
                    lambda f: f.gpus <= f.node,
                    Leaf(
                        "ZeRO-3 (FSDP) inside the node; tensor parallelism where a block does not fit",
                        "dp,zero=3",
                    ),
                    _DENSE_MANY,
                ),
            ),
        ),
    ),
)
TREE: Node = Branch(
    "Serving, not training?",
    ("serving", "training"),
    lambda f: f.serving,
    _SERVING,
    Branch(
        "One GPU?",
        ("one GPU", ""),
        lambda f: f.gpus == 1,
        Leaf(
            "nothing to split: the largest micro-batch that fits, then recomputation, then state on the host", "dp=1"
        ),
        _SEVERAL,
    ),
)


def facts(model: ModelSpec, cluster: ClusterSpec, gpus: int, batch: int, seq: int) -> Facts:
    """Return the facts about a training that the tree reads."""
    outer = cluster.tiers[1] if len(cluster.tiers) > 1 else cluster.tiers[0]
    rate = outer.bandwidth_bytes_per_s_per_gpu_per_direction
    uplink = outer.uplink_bandwidth_bytes_per_s_per_direction
    rates = [t.bandwidth_bytes_per_s_per_gpu_per_direction for t in cluster.tiers[1:]]
    uplinks = [
        t.uplink_bandwidth_bytes_per_s_per_direction / below.ranks
        for below, t in zip(cluster.tiers, cluster.tiers[1:], strict=False)
        if t.uplink_bandwidth_bytes_per_s_per_direction is not None and t is not outer
    ]
    slowest = min([*rates[1:], *uplinks], default=rate)
    return Facts(
        parameters=float(model.parameter_count),
        experts=model.experts.count if model.experts else 0,
        seq=seq,
        sequences=batch / gpus,
        gpus=gpus,
        node=cluster.tiers[0].ranks,
        usable_bytes=cluster.device.usable_bytes,
        network_bytes_per_s=min(rate, uplink / cluster.ranks_per_node) if uplink else rate,
        sites=len(cluster.tiers) > 2 and slowest * 10 <= rate,
    )


def walk(f: Facts, node: Node = TREE) -> tuple[list[tuple[Branch, bool]], Leaf]:
    """Return the questions on the path, with their answers, and the leaf."""
    asked = []
    while isinstance(node, Branch):
        answer = node.holds(f)
        asked.append((node, answer))
        node = node.yes if answer else node.no
    return asked, node


def as_json(f: Facts | None) -> dict[str, object]:
    """Return the tree as plain data, with the answers of a job and where they lead, if one is given."""

    def plain(node: Node) -> dict[str, object]:
        if isinstance(node, Leaf):
            return {"rule": node.rule, "strategy": node.line}
        return {"question": node.question, "yes": plain(node.yes), "no": plain(node.no)}

    if f is None:
        return {"tree": plain(TREE), "path": None, "rule": None, "strategy": None}
    path, leaf = walk(f)
    return {
        "tree": plain(TREE),
        "path": [{"question": branch.question, "answer": "yes" if answer else "no"} for branch, answer in path],
        **plain(leaf),
    }


def leaves(node: Node = TREE) -> Iterator[Leaf]:
    """Yield every leaf, from the first yes on."""
    if isinstance(node, Leaf):
        yield node
    else:
        yield from leaves(node.yes)
        yield from leaves(node.no)


def sentence(f: Facts) -> str:
    """Return the path of a job in a line: its answers, then the leaf."""
    path, leaf = walk(f)
    words = [branch.words[0 if answer else 1] for branch, answer in path]
    return f"{', '.join(filter(None, words))}: {leaf.rule}"
