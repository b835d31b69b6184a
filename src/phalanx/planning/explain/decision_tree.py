"""The usual decision tree for choosing a strategy, as data: every branch is a question about numbers, every leaf a
rule. The tree gives a first guess with reasons; the search gives the answer. `walk` answers the questions for a job
and returns the path; `RULES` in textbook/case_studies.py prices the leaves. N: parameters, 16 N bytes of
state.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from phalanx.spec.cluster.spec import ClusterSpec, Tier
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy import where


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
    """Whether an outer tier is ten times slower than the network between nodes."""
    serving: bool = False


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree: a rule for choosing the strategy."""

    rule: str
    line: str
    """Fields of a strategy, as a pattern."""


@dataclass(frozen=True)
class Branch:
    """A question, and the nodes to which yes and no lead."""

    question: str
    words: tuple[str, str]
    """Meaning of yes and no in a few words; empty if obvious."""
    when: str
    """Its condition on Facts (spec/strategy/where.py)."""
    yes: Node
    no: Node

    def holds(self, f: Facts) -> bool:
        """Whether the answer is yes."""
        names = [field.name for field in fields(Facts)]
        return bool(where.holds(where.parse(self.when, names, {}, "when"), asdict(f)))


Node = Branch | Leaf


def _node(name: str) -> Node:
    row = _ROWS[name]
    if "rule" in row:
        return Leaf(row["rule"], row["strategy"])
    return Branch(row["question"], tuple(row["words"]), row["when"], _node(row["yes"]), _node(row["no"]))


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TREE = _node("root")


def _rate(tier: Tier, ranks: int) -> float:
    """Return the bytes per second of one of `ranks` GPUs that share an uplink, in one direction."""
    uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
    rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
    return rate if uplink is None else min(rate, uplink / ranks)


def facts(model: ModelSpec, cluster: ClusterSpec, gpus: int, batch: int, seq: int) -> Facts:
    """Return the facts about a training that the tree reads."""
    # The tiers that join nodes, each with the ranks that its uplink serves.
    inside = cluster.ranks_per_node
    network = [(t, of) for t, of in zip(cluster.tiers[1:], cluster.tiers, strict=False) if t.ranks > inside]
    rates = [_rate(t, of.ranks) for t, of in network] or [_rate(cluster.tiers[-1], inside)]
    return Facts(
        parameters=float(model.parameter_count),
        experts=model.experts.count if model.experts else 0,
        seq=seq,
        sequences=batch / gpus,
        gpus=gpus,
        node=inside,
        usable_bytes=cluster.device.usable_bytes,
        network_bytes_per_s=rates[0],
        sites=min(rates) * 10 <= rates[0],
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
    """Return the tree as plain data, with a job's answers and the leaf that they lead to; null without a job."""

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
    """Yield every leaf, yes before no."""
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
