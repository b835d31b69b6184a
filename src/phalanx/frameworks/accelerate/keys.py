"""The one table of accelerate's keys and Phalanx's fields, for reading and for writing.

(accelerate/commands/config/config_args.py, parallelism_config.py, utils/dataclasses.py of 1.15.) FSDP2's
`reshard_after_forward` true is zero=3, false is zero=2; MULTI_GPU is zero=0.
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "parallelism_config.parallelism_config_tp_size": "strategy.tp",
    "parallelism_config.parallelism_config_cp_size": "strategy.cp",
    "parallelism_config.parallelism_config_dp_shard_size": "strategy.shard",
    "fsdp_config.fsdp_offload_params": "options.parameter_offload",
}
"""Key -> table.field, for values that are the same in both."""
KEY = {field: key for key, field in FIELDS.items()}
"""The key that holds a field's value."""
RESHARD = {3: True, 2: False}
"""fsdp_reshard_after_forward by ZeRO level."""
