#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
TP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000
)
EXTRA="--bf16 --sequence-parallel"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=$NNODES \
    pretrain_gpt.py "${MODEL_ARGS[@]}" $EXTRA --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et*15|t*17L" \
    --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer > log.txt 2>&1
