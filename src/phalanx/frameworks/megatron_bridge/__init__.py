"""Megatron-Bridge's configuration: which key is which Megatron-LM flag (keys.py), and a plan as that (write.py)."""
