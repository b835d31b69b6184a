"""The decoder family."""
