"""A placement as files that start its ranks there, for Kueue and for torchrun (for Slurm: topology/slurm.py).

Kueue's topology-aware scheduling: a Topology, a ResourceFlavor with it, and the annotations of a job's pods. Schemas:
kubernetes-sigs/kueue, config/components/crd/bases/kueue.x-k8s.io_{topologies,resourceflavors}.yaml, version v1beta2,
at ff69552e79ad of August 2026 (v1beta1 is deprecated there, v1alpha1 is not served). Kueue places pods, not ranks:
one pod takes a node's GPUs. `required` topology: all pods in one domain of that level; `preferred`: if there is one
with room. Written as JSON documents, which YAML contains, so that no quoting can go wrong.

torchrun: a command line for each node, whose ranks follow one another. It numbers ranks node by node
(torch/distributed/elastic/agent/server/api.py, _assign_worker_ranks), so a placement can be started with it only if
every node has ranks in a row, and as many as the others.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from phalanx.frameworks.launchers.export import LEAF_LABEL, documents
from phalanx.planning.placement import Placement
from phalanx.shared_cluster.topology import slurm
from phalanx.shared_cluster.topology.hostlist import compress
from phalanx.spec.errors import InputError, nearest

LAUNCHERS = ("slurm", "torchrun", "kueue")
HOST_LABEL = "kubernetes.io/hostname"


def torchrun(hosts: Sequence[str], gpus: Sequence[int]) -> str:
    """Return a shell script that runs torchrun with the numbers of the node that it is started on.

    `hosts`, `gpus`: host and GPU of each rank. Raises InputError if torchrun cannot number ranks that way.
    """
    names = list(dict.fromkeys(hosts))
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    sizes = {len(of_host) for of_host in ranks.values()}
    scattered = next((n for n, of_host in ranks.items() if of_host[-1] - of_host[0] + 1 != len(of_host)), None)
    if scattered is not None or len(sizes) > 1:
        uneven = f"nodes have {min(sizes)} to {max(sizes)} ranks"
        reason = uneven if scattered is None else f"{scattered} has ranks that are not in a row"
        raise InputError("for", "torchrun", reason, "use --for slurm, which places ranks one by one")
    cases = "\n".join(
        f"  {shlex.quote(name)}) node={node} gpus={','.join(str(gpus[rank]) for rank in ranks[name])} ;;"
        for node, name in enumerate(names)
    )
    return f"""#!/bin/bash
# Start this on every node with the training command; each node finds its own number and GPUs by its host name.
case "$(hostname -s)" in
{cases}
  *) echo "$(hostname -s) has no rank of this job" >&2; exit 1 ;;
esac
export CUDA_VISIBLE_DEVICES=$gpus
exec torchrun --nnodes={len(names)} --node-rank=$node --nproc-per-node={sizes.pop()} \\
  --master-addr={shlex.quote(names[0])} --master-port=29500 "$@"
"""


def topology(name: str) -> dict[str, Any]:
    """Return Kueue's Topology of leaf switches and hosts."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": name},
        "spec": {"levels": [{"nodeLabel": LEAF_LABEL}, {"nodeLabel": HOST_LABEL}]},
    }


def resource_flavor(name: str, device: str) -> dict[str, Any]:
    """Return Kueue's ResourceFlavor of the nodes with a device, on the topology of the same name."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ResourceFlavor",
        "metadata": {"name": name},
        "spec": {"nodeLabels": {"nvidia.com/gpu.product": device}, "topologyName": name},
    }


def job(name: str, pods: int, gpus: int, leaves: int) -> dict[str, Any]:
    """Return a Job of `pods` pods with `gpus` GPUs each, which requires one leaf switch if the placement has one.

    The image and the command are blanks to fill in.
    """
    relation = "required" if leaves == 1 else "preferred"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "FILL-IN-LOCAL-QUEUE"}},
        "spec": {
            "parallelism": pods,
            "completions": pods,
            "completionMode": "Indexed",
            "suspend": True,
            "template": {
                "metadata": {"annotations": {f"kueue.x-k8s.io/podset-{relation}-topology": LEAF_LABEL}},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "rank",
                            "image": "FILL-IN-IMAGE",
                            "command": ["FILL-IN-COMMAND"],
                            "resources": {"limits": {"nvidia.com/gpu": gpus}},
                        }
                    ],
                },
            },
        },
    }


def launch_files(launcher: str, p: Placement, unnumbered: Sequence[str] = ()) -> dict[str, str]:
    """Return name -> text of the files with which a launcher starts each rank at its place. `unnumbered`: hosts whose
    free GPUs are only counted, not numbered. Raises InputError for an unknown launcher, or one that cannot."""
    hosts = [p.topology.hosts[int(host)] for host in p.topology.host[p.gpu]]
    if launcher != "kueue" and (unsaid := set(hosts) & set(unnumbered)):
        reason = f"it is not said which GPUs of {compress(sorted(unsaid))} are free, and its files name them"
        raise InputError("for", launcher, reason, "give --free what scontrol -d show nodes prints")
    gpus = p.topology.index[p.gpu].tolist()
    leaves = len({int(block) for block in p.topology.blocks[-2][p.gpu]}) if len(p.cluster.tiers) > 2 else 1
    if launcher == "slurm":
        script = slurm.launch(hosts, gpus, p.cluster.ranks_per_node, leaves, "hostfile")
        return {"hostfile": slurm.host_file(hosts), "launch.sbatch": script}
    if launcher == "torchrun":
        return {"launch.sh": torchrun(hosts, gpus)}
    if launcher == "kueue":
        sizes = {len(ranks) for _, ranks in p.ranks_by_host()}
        if len(sizes) > 1:
            reason = f"its pods are equal, but nodes have {min(sizes)} to {max(sizes)} ranks"
            raise InputError("for", launcher, reason, "use --for slurm, which places ranks one by one")
        name = "phalanx-job"
        flavor = resource_flavor(name, p.cluster.device.name)
        per_node = sizes.pop()
        pods = job(name, p.world // per_node, per_node, leaves)
        return {"kueue.yaml": documents(topology(name), flavor, pods)}
    raise InputError("for", launcher, "is not a launcher", nearest(launcher, LAUNCHERS))
