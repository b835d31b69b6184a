"""Pictures about choices: the tree of decisions, fragmentation, the stack."""

from collections.abc import Sequence

import numpy as np

from phalanx.planning.explain import decision_tree
from phalanx.planning.explain.decision_tree import Branch
from phalanx.planning.explain.decision_tree import Node as Decision
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.report.pictures.figure import Arrow, Bar, Bars, Box, Diagram, Label, Node, Picture, Tree
from phalanx.shared_cluster.placement.price import PlacedJob
from phalanx.shared_cluster.placement.search import place
from phalanx.spec.cluster.topology import of_cluster
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy

Path_ = Sequence[tuple[Branch, bool]]


def decisions(path: Path_ | None = None, job: str = "") -> Picture:
    """Draw the tree of decisions, with a job's path marked."""

    def node(of: Decision, rest: Path_ | None, edge: str) -> Node:
        taken = rest is not None
        if not isinstance(of, Branch):
            return Node(f"{of.rule} [{of.line}]", edge=edge, taken=taken, leaf=True)
        below = []
        for answer, word, then in ((True, "yes", of.yes), (False, "no", of.no)):
            here = bool(rest) and rest is not None and rest[0] == (of, answer)
            below.append(node(then, rest[1:] if here and rest is not None else None, word))
        return Node(of.question, tuple(below), edge, taken)

    return Picture(
        "The usual tree for choosing a strategy" + (f", with the path of {job}" if job else ""),
        (Tree(node(decision_tree.TREE, path, "")),),
        "`phalanx learn tree`; the rules at its leaves are priced by `phalanx learn cases rules`",
        "A first guess; `phalanx plan` searches.",
    )


def tree(
    model: str | None = None, cluster: str = "dgx-h100", gpus: int = 64, batch: int = 512, seq: int = 4096
) -> Picture:
    """Draw the tree, with the path of a job if a model is named."""
    if model is None:
        return decisions()
    facts = decision_tree.facts(model_named(model)[0], cluster_named(cluster)(gpus), gpus, batch, seq)
    return decisions(decision_tree.walk(facts)[0], f"{model} on {gpus} GPUs of {cluster}")


def fragmentation(model: str = "llama3-8b", cluster: str = "dgx-h100") -> Picture:
    """Draw one job on free GPUs in two nodes and on as many in eight, with its step."""
    spec, _ = model_named(model)
    there = cluster_named(cluster)(64)
    if there.ranks_per_node != 8:
        raise InputError("cluster", cluster, "has no nodes of 8 GPUs, which are drawn", "name another")
    s = Strategy(dp=4, zero=1, tp=4, sp=True)
    job = PlacedJob(spec, there, Job(64, 4096, Precision("bfloat16")), s, "megatron-core")
    topology = of_cluster(there)
    cases = (
        ("whole nodes", [(n, g) for n in (0, 1) for g in range(8)]),
        ("half nodes", [(n, g) for n in range(4) for g in range(4)]),
        ("two GPUs a node", [(n, g) for n in range(8) for g in range(2)]),
    )
    items: list[Box | Arrow | Label] = []
    bars = []
    for case, (name, free) in enumerate(cases):
        placed = place(job, topology, np.array([n * 8 + g for n, g in free]))
        bars.append(Bar(name, (("", placed.seconds),), f"{placed.seconds:.3g} s"))
        items.append(Label(27 * case, 0, name))
        ours = set(placed.placement.gpu.tolist())
        for n in range(8):
            for g in range(8):
                here = n * 8 + g in ours
                items.append(Box(27 * case + 3 * g, 1 + n, 3, 1, ("x" if here else "",), 0 if here else None))
    slower = bars[-1].parts[0][1] / bars[0].parts[0][1]
    return Picture(
        f"Fragmentation: 16 free GPUs of 64 for {model} with {s}",
        (
            Diagram(tuple(items), "Eight nodes, a row each: x is this job's, the others are busy"),
            Bars("seconds of a step", tuple(bars)),
        ),
        f"`phalanx cluster place`: the best placement on these GPUs of {cluster}, under megatron-core",
        f"As many GPUs, in pieces: the step takes {slower:.3g} times as long, because tp leaves the node.",
    )


_FLOORS = (
    ("model and job", "config.json, batch, budget", "plan, predict"),
    ("framework", "Megatron, DeepSpeed, FSDP, ours", "read, export, train"),
    ("parallelism", "dp, ZeRO, tp, sp, cp, ep, pp", "explain, verify, mesh"),
    ("collectives", "NCCL, Gloo, our schedules", "collectives, comm"),
    ("runtime", "torch.distributed, CUDA, kernels", "observe, roofline"),
    ("links", "NVLink, PCIe, InfiniBand", "clusters, measure"),
    ("hardware", "GPUs with HBM, hosts, switches", "clusters, check"),
)


def stack() -> Picture:
    """Draw the stack from hardware to framework, with the command that shows each floor."""
    items: list[Box | Arrow | Label] = [Label(54, 0, "shown by phalanx", True)]
    for i, (name, what, command) in enumerate(_FLOORS):
        y = 1 + 3 * i
        items += [Box(0, y, 16, 3, (name,), i), Box(16, y, 36, 3, (what,)), Label(54, y + 1, command)]
    return Picture(
        "The stack, from hardware to framework",
        (Diagram(tuple(items)),),
        "the commands are named as in `phalanx --help`",
        "Each floor uses those below it; a command of each shows its numbers.",
    )
