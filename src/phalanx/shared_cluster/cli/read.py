"""`phalanx cluster read`: the topology of a real cluster, from what its tools print."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import announce, exit_on_error, print_json, require_writable


def read(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Slurm's topology.conf or .yaml, or what scontrol, ibnetdiscover, nvidia-smi topo -m, rocm-smi "
            "--showtopo or NCCL_TOPO_DUMP_FILE write.",
        ),
    ],
    like: Annotated[
        str | None, typer.Option(metavar="NAME", help="Preset whose nodes the hosts are like, for switches.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="CHIP", help="The GPUs of the host, such as H100.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="How many hosts like this one the cluster has.")] = None,
    port_gbit: Annotated[float | None, typer.Option(help="Gb/s of each of its NICs, for several hosts.")] = None,
    slurm: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the switches as a topology.conf.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Write the cluster, for --cluster.")] = None,
    as_json: Json = False,
) -> None:
    """Read the topology of a real cluster from what its tools print, and write it as a cluster for the planner.

    phalanx cluster read topology.conf --like dgx-h100 --out cluster.toml
    """
    with exit_on_error():
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
        if as_json:
            print_json(asdict(content))
            return
        for line in summary(content):
            print(line)
