"""MLPs, routing, and mixtures of experts."""
