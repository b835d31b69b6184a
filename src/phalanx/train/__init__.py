"""The trainer: data, steps, checkpoints, launch."""
