"""Generation from a checkpoint."""
