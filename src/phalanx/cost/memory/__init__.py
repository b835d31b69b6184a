"""Live bytes of one rank of our own runtime: the model state, and activations tensor by tensor along each pass.

Read footprint.py first (the bytes of each unit), then passes.py (the passes of a block) and sublayer.py (an operator
at a time); state.py has the bytes that live through the whole step.
"""
