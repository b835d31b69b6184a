"""transformers' Trainer, which DeepSpeed and accelerate run under: the script and its arguments."""
