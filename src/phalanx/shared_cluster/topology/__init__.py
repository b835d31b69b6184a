"""The topology of real clusters, read from the output of their tools."""
