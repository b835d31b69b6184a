"""Measured times of serving engines, compared with the predicted ones."""
