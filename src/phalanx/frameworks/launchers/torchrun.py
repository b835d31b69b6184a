"""Plain nodes: a script that each of them runs, which finds its own number by its host name."""

from __future__ import annotations

from phalanx.frameworks.launchers.task import PORT, Task
from phalanx.frameworks.script import comment


def files(t: Task) -> dict[str, str]:
    """Return launch.sh."""
    if t.nodes == 1:
        return {"launch.sh": f'#!/bin/bash\n# One node of {t.gpus} GPUs.\nexec bash "$(dirname "$0")/train.sh"\n'}
    about = (
        f"Run this on each of the {t.nodes} nodes of {t.gpus} GPUs (pdsh, clush, ssh). Neighbours in HOSTS are "
        "neighbours in the mesh: list nodes of one switch in a row."
    )
    return {
        "launch.sh": f"""#!/bin/bash
{comment(about)}# Blank: the {t.nodes} host names, as `hostname -s` prints them.
HOSTS=(${{HOSTS:-FILL-IN}})
[ "${{HOSTS[0]}}" != FILL-IN ] || {{ echo "$0: HOSTS is a blank: fill it in" >&2; exit 2; }}
[ "${{#HOSTS[@]}}" = {t.nodes} ] || {{ echo "$0: HOSTS has ${{#HOSTS[@]}} names, {t.nodes} are needed" >&2; exit 2; }}
export NNODES={t.nodes} NPROC_PER_NODE={t.gpus} MASTER_ADDR=${{HOSTS[0]}} MASTER_PORT=${{MASTER_PORT:-{PORT}}}
for i in "${{!HOSTS[@]}}"; do
  [ "${{HOSTS[$i]}}" != "$(hostname -s)" ] || export NODE_RANK=$i
done
[ -n "${{NODE_RANK:-}}" ] || {{ echo "$0: $(hostname -s) is not among HOSTS" >&2; exit 2; }}
exec bash "$(dirname "$0")/train.sh"
"""
    }
