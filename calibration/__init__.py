"""A developer's tool, not installed: fits the constants of predictions on published runs. Start with `__main__`."""
