"""Measured costs of placements, compared with the predicted ones."""
