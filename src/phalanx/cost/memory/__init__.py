"""Live bytes of one rank of our own runtime: the model state, and activations tensor by tensor along each pass.

Read footprint.py first (the bytes of each unit, and of the model's two ends), then block.py, whose subclasses
in moe.py, mla.py and split_backward.py override their layers; state.py has the bytes that live through the whole
step.
"""
