"""Parallelism inside a replica of the model: tensor and sequence, context, expert, and pipeline parallelism, a file
each. Read tensor.py first, then pipeline.py."""
