"""Serving of trained models: cost, simulated queues, the search for a deployment, and its engine's launch lines."""
