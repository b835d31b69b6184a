"""Slurm's files: topology.conf of the tree and block plugins (as `scontrol show topology` prints it), topology.yaml
(25.05), and host files for an arbitrary distribution of ranks.

Grammar of topology.conf (slurm.schedmd.com/topology.conf.html): lines of Key=Value, keys in any case, # starts a
comment, a backslash continues a line. SwitchName with Nodes or Switches (tree), BlockName with Nodes (block);
LinkSpeed and BlockSizes are ignored. Host lists as in hostlist.py.

SLURM_HOSTFILE with `srun --distribution=arbitrary`: one host name a line, for rank 0, 1, ... (srun(1), -m arbitrary).
"""

import re
import shlex
from collections.abc import Sequence

from phalanx.frameworks.tables import documents
from phalanx.shared_cluster.topology.hostlist import compress, expand, require_host_name
from phalanx.spec.cluster.topology import SwitchTree
from phalanx.spec.errors import InputError

_TREE_KEYS = ("switchname", "switches", "linkspeed", "level", "nodes")
_BLOCK_KEYS = ("blockname", "blocksizes", "blockindex", "blocksize")


def read_topology(text: str, file: str) -> SwitchTree:
    """Read a topology.conf; `file` names it in messages. Raises InputError with the line."""
    leaves: dict[str, tuple[str, ...]] = {}
    above: dict[str, tuple[str, ...]] = {}
    lines = text.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines, 1):
        fields = _fields(line.partition("#")[0], f"{file} line {number}")
        name = fields.get("switchname") or fields.get("blockname")
        if not name:
            if set(fields) - {"blocksizes"}:
                raise InputError(f"{file} line {number}", line.strip(), "names no switch", "write SwitchName=...")
            continue
        if name in leaves or name in above:
            raise InputError(f"{file} line {number}", name, "is named twice")
        if not fields.get("nodes") and not fields.get("switches"):
            raise InputError(f"{file} line {number}", name, "needs Nodes or Switches")
        if fields.get("switches") and fields.get("nodes") and "level" not in fields:
            raise InputError(f"{file} line {number}", name, "has both Nodes and Switches", "name one of them")
        if not fields.get("switches"):
            leaves[name] = tuple(expand(fields["nodes"], f"{file} line {number}"))
        else:
            above[name] = tuple(expand(fields["switches"], f"{file} line {number}"))
    return _check(SwitchTree(leaves, above), file)


def read_yaml(text: str, file: str) -> SwitchTree:
    """Read a topology.yaml (slurm.schedmd.com/topology.yaml.html): the cluster's default topology, of the tree plugin
    or of blocks. Raises InputError."""
    (content,) = documents(text, ".yaml", file) or [None]
    named = [t for t in content if isinstance(t, dict)] if isinstance(content, list) else []
    switched = [t for t in named if isinstance(t.get("tree"), dict) or isinstance(t.get("block"), dict)]
    if not switched:
        raise InputError(file, None, "has no topology of switches or blocks", "one with `tree:` or `block:`")
    chosen = next((t for t in switched if t.get("cluster_default")), switched[0])
    tree = chosen.get("tree") or {}
    leaves: dict[str, tuple[str, ...]] = {}
    above: dict[str, tuple[str, ...]] = {}
    blocks = chosen["block"].get("blocks") if not tree else []
    for row in [*(tree.get("switches") or []), *(blocks or [])]:
        row = row if isinstance(row, dict) else {}
        name = str(row.get("switch") or row.get("block") or "")
        if not name or name in leaves or name in above:
            raise InputError(file, name or None, "is named twice" if name else "has a switch without a name")
        if row.get("children"):
            above[name] = tuple(expand(str(row["children"]), file))
        elif row.get("nodes"):
            leaves[name] = tuple(expand(str(row["nodes"]), file))
        else:
            raise InputError(file, name, "needs nodes or children")
    return _check(SwitchTree(leaves, above), file)


def of_nodes(hosts: Sequence[str], file: str) -> SwitchTree:
    """Return a tree with one leaf for hosts whose switches are not in a scheduler's list. Raises InputError."""
    return _check(SwitchTree({"all": tuple(hosts)} if hosts else {}, {}, stated=False), file)


def _fields(line: str, file: str) -> dict[str, str]:
    fields = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if not equals or key.lower() not in (*_TREE_KEYS, *_BLOCK_KEYS):
            raise InputError(file, word, "is not a field of topology.conf", "e.g. SwitchName=s0 Nodes=node[0-15]")
        fields[key.lower()] = value
    return fields


def _check(tree: SwitchTree, file: str) -> SwitchTree:
    """Return a tree, checked: every host is under one leaf, and every switch exists. Raises InputError."""
    if not tree.leaves:
        raise InputError(file, None, "has no switch with nodes")
    seen: dict[str, str] = {}
    for leaf, hosts in tree.leaves.items():
        for host in hosts:
            if host in seen:
                raise InputError(file, host, f"is under {seen[host]} and {leaf}", "give every node one leaf")
            seen[host] = leaf
    for switch, below in tree.above.items():
        for child in below:
            if child not in tree.leaves and child not in tree.above:
                raise InputError(file, child, f"is below {switch}, but is not a switch of this file")
    return tree


def write_topology(tree: SwitchTree) -> str:
    """Return a topology.conf of the tree plugin. Other characters of a name than letters, digits, `_`, `-` and `.`
    become `_`."""
    lines = [f"SwitchName={_name(leaf)} Nodes={compress(hosts)}" for leaf, hosts in tree.leaves.items()]
    above = tree.above or ({"spine": tuple(tree.leaves)} if len(tree.leaves) > 1 else {})
    lines += [f"SwitchName={_name(name)} Switches={compress(map(_name, below))}" for name, below in above.items()]
    return "\n".join(lines) + "\n"


def _name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def host_file(hosts: Sequence[str]) -> str:
    """Return the text of a SLURM_HOSTFILE: the host of each rank, in order."""
    return "".join(f"{host}\n" for host in hosts)


def launch(hosts: Sequence[str], gpus: Sequence[int], node: int, switches: int, host_file_name: str) -> str:
    """Return a batch script that starts each rank on its host and GPU.

    `hosts`, `gpus`: of each rank; `node`: GPUs of a node; `switches`: leaf switches that the ranks are under. Raises
    InputError for a name that no host can have.
    """
    names = [require_host_name(name, "hosts") for name in dict.fromkeys(hosts)]
    each = sorted({hosts.count(name) for name in names})
    if each == [node]:
        asked = f"#SBATCH --gpus-per-node={node}\n#SBATCH --exclusive"
    else:  # the option has one number for all nodes
        count = f"--gpus-per-node={each[0]}" if len(each) == 1 else f"--gpus={len(hosts)}"
        asked = f"#SBATCH {count}\n# Slurm chooses which GPUs of a node: see that they are the ones listed below."
    return f"""#!/bin/bash
#SBATCH --nodes={len(names)}
#SBATCH --nodelist={compress(sorted(names))}
#SBATCH --ntasks={len(hosts)}
{asked}
#SBATCH --switches={switches}
# Rank r runs on line r of the host file; the distribution of tasks is ours, not Slurm's.
export SLURM_HOSTFILE="$PWD/{host_file_name}"
GPUS=({" ".join(map(str, gpus))})
export MASTER_ADDR={shlex.quote(hosts[0])} MASTER_PORT=29500 WORLD_SIZE={len(hosts)}
export GPUS_OF_RANKS="${{GPUS[*]}}"
srun --distribution=arbitrary bash -c '
  gpus=($GPUS_OF_RANKS)
  export RANK=$SLURM_PROCID LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=${{gpus[$SLURM_PROCID]}}
  exec "$@"' bash "$@"
"""
