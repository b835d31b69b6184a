"""Megatron-Bridge's configuration, each key of which is a flag of Megatron-LM (flags.toml), and NeMo's."""
