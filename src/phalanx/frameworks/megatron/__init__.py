"""Megatron-LM's command line: which flag is which field (flags.py), and a plan as arguments (write.py)."""
