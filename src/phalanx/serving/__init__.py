"""Serving of trained models: cost, queues, the search for a deployment, and the launch lines of its engine."""
