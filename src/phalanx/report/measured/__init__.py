"""Views of runs and measurements: pages of runs, diagnoses, proofs, machines."""
