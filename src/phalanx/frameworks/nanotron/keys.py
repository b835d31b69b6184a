"""The one table of nanotron's keys and Phalanx's fields, for reading and for writing (nanotron/config/config.py)."""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "parallelism.dp": "strategy.dp",
    "parallelism.tp": "strategy.tp",
    "parallelism.pp": "strategy.pp",
    "parallelism.context_parallel_size": "strategy.cp",
    "optimizer.zero_stage": "strategy.zero",
    "tokens.micro_batch_size": "strategy.micro_batch",
    "tokens.sequence_length": "job.seq",
    "model.ddp_bucket_cap_mb": "strategy.bucket",
    "optimizer.clip_grad": "job.clip",
    "optimizer.weight_decay": "job.optimizer.weight_decay",
    "optimizer.optimizer_factory.adam_beta1": "job.optimizer.betas.0",
    "optimizer.optimizer_factory.adam_beta2": "job.optimizer.betas.1",
    "optimizer.optimizer_factory.adam_eps": "job.optimizer.eps",
    "model.model_config.hidden_size": "model.hidden",
    "model.model_config.intermediate_size": "model.ffn",
    "model.model_config.num_hidden_layers": "model.layers",
    "model.model_config.num_attention_heads": "model.heads",
    "model.model_config.num_key_value_heads": "model.kv_heads",
    "model.model_config.max_position_embeddings": "model.max_seq",
    "model.model_config.vocab_size": "model.vocab",
    "model.model_config.rms_norm_eps": "model.norm_eps",
    "model.model_config.rope_theta": "model.rope_theta",
    "model.model_config.tie_word_embeddings": "model.tied",
}
"""Key -> table.field, for values that are the same in both."""
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "parallelism.pp_engine": ("strategy.schedule", {"1f1b": "1f1b", "afab": "gpipe"}),
    "parallelism.tp_mode": ("strategy.sp", {"REDUCE_SCATTER": "1", "ALL_REDUCE": "0"}),
}
"""Key -> (table.field, {its word: the field's value})."""
KEY = {field: key for key, field in FIELDS.items()}
"""The key that holds a field's value."""
WORD = {field: (key, {value: word for word, value in words.items()}) for key, (field, words) in WORDS.items()}
"""The key of a field, and its word for each value."""
