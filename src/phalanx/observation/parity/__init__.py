"""Parity: the losses and gradients of a distributed step, compared with those of one process in fp64."""
