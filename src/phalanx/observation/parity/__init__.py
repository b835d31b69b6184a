"""Parity: the losses and gradients of a distributed step, compared with one process in fp64."""
