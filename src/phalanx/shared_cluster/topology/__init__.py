"""The topology of real clusters, read from what their tools print."""
