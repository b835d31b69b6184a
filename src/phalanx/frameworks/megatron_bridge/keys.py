"""The one table of Megatron-LM's flags and the keys of Megatron-Bridge's ConfigContainer.

Both configure the same Megatron-Core: a plan is written as flags (frameworks/megatron) and each flag as its key here;
a reader may go the other way. Source: Megatron-Bridge 0.6, src/megatron/bridge/training/config.py:961,
models/gpt_provider.py, training/mixed_precision.py, training/comm_overlap.py, peft/lora.py.
"""

from __future__ import annotations

_OF_MODEL = """
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels 
    --normalization --rotary-base --rotary-percent --rope-type --rotary-scaling-factor --mscale --mscale-all-dim
    --rope-scaling-factor
    --position-embedding-type --add-qkv-bias --attention-dropout --hidden-dropout --multi-latent-attention
    --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --moe-router-topk
    --moe-ffn-hidden-size --moe-shared-expert-intermediate-size --moe-layer-freq --moe-grouped-gemm
    --moe-router-score-function --moe-router-pre-softmax --moe-router-topk-scaling-factor --moe-router-num-groups
    --moe-router-group-topk --moe-router-enable-expert-bias --moe-router-bias-update-rate
    --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff --moe-expert-capacity-factor
    --moe-token-drop-policy --moe-token-dispatcher-type --moe-flex-dispatcher-backend --moe-permute-fusion
    --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --pipeline-model-parallel-layout
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --context-parallel-size
    --cp-comm-type --hierarchical-context-parallel-sizes --expert-model-parallel-size --expert-tensor-parallel-size
    --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules --mtp-num-layers
    --cpu-offloading-num-layers
"""
KEYS: dict[str, str] = {
    **{flag: f"model.{flag[2:].replace('-', '_')}" for flag in _OF_MODEL.split()},
    "--norm-epsilon": "model.layernorm_epsilon",
    "--qk-layernorm": "model.qk_layernorm",
    "--padded-vocab-size": "model.vocab_size",
    "--rotary-seq-len-interpolation-factor": "model.seq_len_interpolation_factor",
    "--use-rope-scaling": "model.rope_scaling",
    "--num-experts": "model.num_moe_experts",
    "--num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "--decoder-first-pipeline-num-layers": "model.num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "model.num_layers_in_last_pipeline_stage",
    "--use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "--distributed-backend": "dist.distributed_backend",
    "--tp-comm-overlap": "comm_overlap.tp_comm_overlap",
    "--overlap-moe-expert-parallel-comm": "comm_overlap.overlap_moe_expert_parallel_comm",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--ddp-bucket-size": "ddp.bucket_size",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--train-iters": "train.train_iters",
    "--seq-length": "model.seq_length",
    "--bf16": "mixed_precision.bf16",
    "--fp16": "mixed_precision.fp16",
    "--fp8-format": "mixed_precision.fp8",
    "--fp8-recipe": "mixed_precision.fp8_recipe",
    "--fp8-param-gather": "mixed_precision.fp8_param_gather",
    "--fp4-format": "mixed_precision.fp4",
    "--fp4-param-gather": "mixed_precision.fp4_param_gather",
    "--accumulate-allreduce-grads-in-fp32": "mixed_precision.grad_reduce_in_fp32",
    "--optimizer": "optimizer.optimizer",
    "--adam-beta1": "optimizer.adam_beta1",
    "--adam-beta2": "optimizer.adam_beta2",
    "--adam-eps": "optimizer.adam_eps",
    "--sgd-momentum": "optimizer.sgd_momentum",
    "--weight-decay": "optimizer.weight_decay",
    "--clip-grad": "optimizer.clip_grad",
    "--lr": "optimizer.lr",
    "--min-lr": "optimizer.min_lr",
    "--use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
    "--exp-avg-dtype": "optimizer.exp_avg_dtype",
    "--exp-avg-sq-dtype": "optimizer.exp_avg_sq_dtype",
    "--main-params-dtype": "optimizer.main_params_dtype",
    "--main-grads-dtype": "optimizer.main_grads_dtype",
    "--optimizer-cpu-offload": "optimizer.optimizer_cpu_offload",
    "--optimizer-offload-fraction": "optimizer.optimizer_offload_fraction",
    "--lr-decay-style": "scheduler.lr_decay_style",
    "--lr-warmup-iters": "scheduler.lr_warmup_iters",
    "--tokenizer-type": "tokenizer.tokenizer_type",
    "--tokenizer-model": "tokenizer.tokenizer_model",
    "--data-path": "dataset.data_path",
    "--split": "dataset.split",
    "--save": "checkpoint.save",
    "--load": "checkpoint.load",
    "--save-interval": "checkpoint.save_interval",
    "--eval-interval": "validation.eval_interval",
    "--eval-iters": "validation.eval_iters",
    "--log-interval": "logger.log_interval",
    "--log-throughput": "logger.log_throughput",
}
"""Flag -> key, for values that are the same in both."""
IMPLIED = ("--use-mcore-models", "--transformer-impl", "--group-query-attention", "--max-position-embeddings")
"""Flags without a key: what they say follows there from the others."""
INVERTED = {
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
    "--disable-bias-linear": "model.add_bias_linear",
}
"""Flag -> the key that is true where the flag is missing."""
DTYPES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.uint8"}
"""Word of the optimizer's dtype flags -> that of their keys."""
TARGETS = {
    "attention": ("linear_qkv", "linear_proj"),
    "linear": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
"""options.lora_targets -> peft.target_modules."""
