"""What any torch program does at any scale: one rank of it runs here, without other ranks, GPUs or memory.

Read contentless.py first (tensors without content), then world.py (the process group and the GPUs that a program
believes in), run.py (one rank's observation in this process) and worker.py (a user's script in a process of its own).
"""
