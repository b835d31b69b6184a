"""The analytic engine: the price of a step of any published software stack on any cluster, in closed form.

Read estimate.py first, then step.py (time) and memory.py (bytes); model_shape.py and rank_layout.py say what of a
model and of a strategy they read, stacks.py and chips.py the constants of software and hardware. Every formula takes
numbers or NumPy columns. No torch.
"""
