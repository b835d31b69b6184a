"""Slurm: a batch script with one task a node, which starts that node's ranks (sbatch(1), srun(1)).

`--switches=N` asks for nodes under at most N leaf switches, where the cluster says how many GPUs a leaf has.
`--distribution=block` numbers nodes in the order of the list, which topology/tree keeps by switch.
"""

from __future__ import annotations

from phalanx.frameworks.launchers.task import PORT, Task


def files(t: Task) -> dict[str, str]:
    """Return job.sbatch."""
    switches = ""
    if t.leaves:
        switches = (
            "# As few leaf switches as the nodes fit under, so that inner mesh axes stay below one; 1 h at most.\n"
            f"#SBATCH --switches={t.leaves}@01:00:00\n"
        )
    return {
        "job.sbatch": f"""#!/bin/bash
#SBATCH --job-name={t.name}
#SBATCH --nodes={t.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={t.gpus}
#SBATCH --exclusive
#SBATCH --distribution=block
{switches}# Add --partition, --account and --time of your cluster, here or on the command line.
# Submit it from this folder, on a file system that all nodes see:  sbatch job.sbatch
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export NNODES=$SLURM_JOB_NUM_NODES NPROC_PER_NODE={t.gpus}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$(({PORT} + SLURM_JOB_ID % 1000))  # two jobs that share their first node's name do not clash
srun --kill-on-bad-exit=1 bash -c 'export NODE_RANK=$SLURM_NODEID; exec bash ./train.sh'
"""
    }
