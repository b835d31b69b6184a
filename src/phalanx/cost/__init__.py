"""The price of a training step: its time, memory and traffic. Arithmetic only, no torch.

Three engines price steps. `cost/step` is exact: it predicts our own runtime's step, event by event, on a measured
machine (train, `plan JOB.toml`, verify). `cost/analytic` prices any published software stack on any cluster in closed
form, with constants fitted to published runs (predict, `plan --model`, validate). `planning/search/best_first.py`
only prunes the search of `plan JOB.toml`: it gives lower bounds on the seconds and bytes of a strategy, from passes
priced by `cost/step`. Each engine prices an all-reduce in one place. `cost/step` takes the cheapest measured fit for
such a group, else a ring over the cluster's links: cost/collectives/measured.py, with α and β from link.py.
`cost/analytic` takes cost/collectives/nccl_model.py. The lower bounds price all-reduces inside layers as `cost/step`
does, and leave out all-reduces of gradients.
"""
