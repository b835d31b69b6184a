"""The queue before a model that is served: continuous batching, simulated in events."""
