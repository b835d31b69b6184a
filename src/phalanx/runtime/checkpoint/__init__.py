"""Checkpoints of logical tensors, saved asynchronously and readable under any parallel layout.

Read store.py first: what a checkpoint's folder holds and how it is written. async_saver.py saves from all ranks while
they train on; boxes.py cuts a rank's shards into the boxes that the container (container.py) stores.
"""
