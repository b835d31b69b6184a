"""The analytic engine: the price of a step of any published software stack on any cluster, in closed form.

Read estimate.py first, then step.py (time) and memory.py (bytes); ledger/model_shape.py and ledger/rank_layout.py
have the sizes of a model and of a strategy, profile.py and chips.py the constants of software and hardware. Every
formula takes numbers or NumPy columns. No torch.
"""
