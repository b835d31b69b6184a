"""Sublayers with a state in place of attention, and the convolutions before them."""
