"""Observing training steps without their hardware. Each step runs as one rank at a time, on fake tensors, and its
messages, FLOPs and memory are recorded: `verify` compares our own step with its plan, `observe` describes any
program's.

Read fake/recorder.py first (tensors without content), then fake/world.py (the process group and GPUs that a program
finds), program/run.py (one rank of a program) and trainer/step.py (one rank of our own step).
"""
