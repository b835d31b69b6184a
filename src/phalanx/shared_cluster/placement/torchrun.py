"""torchrun: a command line for each node, whose ranks follow one another.

torchrun numbers ranks node by node (torch/distributed/elastic/agent/server/api.py, _assign_worker_ranks), so a
placement can be started with it only if every node has ranks in a row, and as many as the others.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from phalanx.spec.errors import InputError


def commands(hosts: Sequence[str], gpus: Sequence[int]) -> str:
    """Write a shell script that runs the command of the node that it is started on.

    `hosts`, `gpus`: of each rank. Raises InputError if torchrun cannot number ranks that way.
    """
    names = list(dict.fromkeys(hosts))
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    sizes = {len(own) for own in ranks.values()}
    scattered = next((n for n, own in ranks.items() if own[-1] - own[0] + 1 != len(own)), None)
    if scattered is not None or len(sizes) > 1:
        reason = (
            f"{scattered} has ranks that are not in a row"
            if scattered is not None
            else f"nodes have {min(sizes)} to {max(sizes)} ranks"
        )
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
