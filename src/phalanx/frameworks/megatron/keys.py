"""The one table of Megatron-LM's flags and Phalanx's fields, for reading and for writing.

`FIELDS`: flags that hold a field's value as it is. `WORDS`: flags of which each word stands for a value. What takes
several flags together (schedules, recomputation, pipeline layouts, context parallelism) is code in write.py, read.py.
Source: megatron/training/arguments.py and the config dataclasses that it makes flags of (Megatron-Core 0.19).
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "--tensor-model-parallel-size": "strategy.tp",
    "--sequence-parallel": "strategy.sp",
    "--pipeline-model-parallel-size": "strategy.pp",
    "--context-parallel-size": "strategy.cp",
    "--expert-model-parallel-size": "strategy.ep",
    "--expert-tensor-parallel-size": "strategy.etp",
    "--micro-batch-size": "strategy.micro_batch",
    "--global-batch-size": "job.global_batch",
    "--seq-length": "job.seq",
    "--clip-grad": "job.clip",
    "--weight-decay": "job.optimizer.weight_decay",
    "--adam-beta1": "job.optimizer.betas.0",
    "--adam-beta2": "job.optimizer.betas.1",
    "--adam-eps": "job.optimizer.eps",
    "--num-layers": "model.layers",
    "--hidden-size": "model.hidden",
    "--ffn-hidden-size": "model.ffn",
    "--num-attention-heads": "model.heads",
    "--num-query-groups": "model.kv_heads",
    "--kv-channels": "model.head_dim",
    "--max-position-embeddings": "model.max_seq",
    "--padded-vocab-size": "model.vocab",
    "--norm-epsilon": "model.norm_eps",
    "--rotary-base": "model.rope_theta",
    "--qk-layernorm": "model.qk_norm",
    "--num-experts": "model.experts.count",
    "--moe-router-topk": "model.experts.top_k",
    "--moe-ffn-hidden-size": "model.experts.ffn",
    "--moe-shared-expert-intermediate-size": "model.experts.shared_ffn",
    "--moe-router-score-function": "model.experts.score",
    "--moe-router-topk-scaling-factor": "model.experts.scale",
    "--moe-router-num-groups": "model.experts.groups",
    "--moe-router-group-topk": "model.experts.top_groups",
    "--moe-router-bias-update-rate": "model.experts.balance_bias",
    "--moe-z-loss-coeff": "model.experts.z_loss",
    "--moe-expert-capacity-factor": "model.experts.capacity",
    "--q-lora-rank": "model.latent.q_rank",
    "--kv-lora-rank": "model.latent.kv_rank",
    "--qk-head-dim": "model.latent.nope_dim",
    "--qk-pos-emb-head-dim": "model.latent.rope_dim",
    "--v-head-dim": "model.latent.v_dim",
    "--decoder-first-pipeline-num-layers": "options.first_stage_layers",
    "--decoder-last-pipeline-num-layers": "options.last_stage_layers",
    "--account-for-embedding-in-pipeline-split": "options.embedding_as_layer",
    "--account-for-loss-in-pipeline-split": "options.loss_as_layer",
    "--optimizer-offload-fraction": "options.optimizer_offload",
    "--cpu-offloading-num-layers": "options.activation_offload",
    "--mtp-num-layers": "options.mtp",
}
"""Flag -> table.field, for values that are the same in both."""

TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "--exp-avg-dtype": ("options.first_moment", TYPES),
    "--exp-avg-sq-dtype": ("options.second_moment", TYPES),
    "--main-params-dtype": ("options.master", TYPES),
    "--main-grads-dtype": ("options.gradients", TYPES),
    "--fp8-recipe": (
        "options.products",
        {
            "delayed": "float8-delayed",
            "tensorwise": "float8",
            "blockwise": "float8-block",
            "mxfp8": "mxfp8",
        },
    ),
    "--moe-token-dispatcher-type": ("options.dispatch", {"allgather": "all_gather", "alltoall": "all_to_all"}),
    "--moe-flex-dispatcher-backend": ("options.dispatch", {"deepep": "deepep", "hybridep": "hybridep"}),
    "--normalization": ("model.norm", {"RMSNorm": "rms", "LayerNorm": "layer"}),
    "--data-parallel-sharding-strategy": (
        "strategy.zero",
        {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"},
    ),
}
"""Flag -> (table.field, {its word: the field's value})."""

FLAG = {field: flag for flag, field in FIELDS.items()}
"""The flag that holds a field's value."""
WORD = {field: (flag, {value: word for word, value in words.items()}) for flag, (field, words) in WORDS.items()}
"""The flag of a field, and its word for each value (the last one where several flags set it)."""
