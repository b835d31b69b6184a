"""Megatron-Bridge's configuration: which of its keys is which Megatron-LM flag (keys.py), and a plan as that (write.py)."""
