"""Megatron-LM's command line: what it can do, read, written and checked."""
