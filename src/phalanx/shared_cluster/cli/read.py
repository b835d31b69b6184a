"""`phalanx cluster read`: the topology of a real cluster, from what its tools print."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command
from phalanx.cli.terminal import announce, print_json, require_writable


@command
def read(
    file: Path,
    like: str | None = None,
    device: str | None = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="How many hosts like this one the cluster has.")] = None,
    port_gbit: float | None = None,
    slurm: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Read the topology of a real cluster from what its tools print, and write it as a cluster for the planner.

    phalanx cluster read topology.conf --like dgx-h100 --out cluster.toml

    file FILE: Slurm's topology.conf or .yaml, or what scontrol, ibnetdiscover, nvidia-smi topo -m, rocm-smi
        --showtopo or NCCL_TOPO_DUMP_FILE write.
    --like NAME: Preset whose nodes the hosts are like, for switches.
    --device CHIP: The GPUs of the host, such as H100.
    --port-gbit: Gb/s of each of its NICs, for several hosts.
    --slurm FILE: Write the switches as a topology.conf.
    --out FILE.toml: Write the cluster, for --cluster.
    """
    from phalanx.shared_cluster.topology.reading import described, read_topology, summary
    from phalanx.shared_cluster.topology.slurm import write_topology
    from phalanx.spec.cluster.topology import SwitchTree
    from phalanx.spec.errors import InputError
    from phalanx.spec.files.cluster_toml import to_toml

    require_writable("--slurm", slurm)
    require_writable("--out", out)
    content = read_topology(file)
    if slurm:
        if not isinstance(content, SwitchTree):
            raise InputError("--slurm", str(slurm), "nvidia-smi knows one host, and no switches")
        slurm.write_text(write_topology(content))
    if out:
        if nodes is None and not isinstance(content, SwitchTree):
            announce("note: a cluster of this one host is written: --nodes says how many there are")
        spec = described(content, like, device, nodes or 1, port_gbit, out.stem)
        out.write_text(to_toml(spec, f"from {file.name}"))
    if json:
        print_json(asdict(content))
        return
    for line in summary(content):
        print(line)
