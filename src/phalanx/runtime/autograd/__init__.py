"""Autograd functions that layers are built from: recomputation, deferred weight gradients, attention's core.

Read deferred_weight_grads.py first: it explains how a backward pass is split in two, which the others build on.
"""
