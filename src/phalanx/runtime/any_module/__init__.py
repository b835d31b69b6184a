"""Data parallelism for any torch.nn.Module: `parallelize` (parallelize.py), and how a module is cut (units.py)."""
