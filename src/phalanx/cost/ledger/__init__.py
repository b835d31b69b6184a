"""Volumes of a strategy under a stack's policy, as columns: operations, bytes, FLOPs and live bytes.

One row of columns is one strategy. Times (cost/analytic), tables and bounds (plan) read volumes here and derive none
of their own; a drawn test requires the ledger of our own stack to equal its StepProgram (cost/step). Read policy.py
first (differences between stacks, and when gradients reduce and parameters are gathered under each).
model_shape.py and rank_layout.py have the sizes of a model and of a strategy. No torch.
"""
