"""The one table of DeepSpeed's keys and Phalanx's fields, for reading and for writing (deepspeed/runtime/config.py).

What takes several keys together (offload, optimizer, MiCS) is code in write.py and read.py. Buckets are in elements.
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "train_batch_size": "job.global_batch",
    "train_micro_batch_size_per_gpu": "strategy.micro_batch",
    "gradient_clipping": "job.clip",
    "zero_optimization.stage": "strategy.zero",
    "zero_optimization.mics_shard_size": "strategy.shard",
    "tensor_parallel.autotp_size": "strategy.tp",
    "sequence_parallel_size": "strategy.cp",
}
"""Key -> table.field, for values that are the same in both."""
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "data_types.grad_accum_dtype": ("options.gradients", TYPES),
    "communication_data_type": ("options.reduce", TYPES),
}
"""Key -> (table.field, {its word: the field's value})."""
KEY = {field: key for key, field in FIELDS.items()}
"""The key that holds a field's value."""
GRADIENT_BYTES = 2
"""Bytes of a gradient in a bucket: gradients are in the type of the parameters."""
