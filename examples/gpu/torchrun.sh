#!/bin/bash
# On every node:  HOST=first-node NODES=2 bash examples/gpu/torchrun.sh JOB.toml      one process a GPU
set -eu
FABRIC=${FABRIC:-infiniband} . "$(dirname "$0")/nccl.sh"
torchrun --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" --rdzv-backend c10d \
  --rdzv-endpoint "${HOST:-localhost}:${PORT:-29500}" -m phalanx train "${1:?JOB.toml is missing}"
