"""What a strategy does under a stack's policy, as columns: operations, bytes, FLOPs and live bytes.

One row of columns is one strategy. Times (cost/analytic), tables and bounds (plan) read volumes here and derive none
of their own; a drawn test holds the ledger of our own stack equal to its StepProgram (cost/step). Read policy.py
first: what stacks do differently; then sharding.py: when gradients reduce, what is gathered. model_shape.py and
rank_layout.py say what of a model and of a strategy is read. No torch.
"""
