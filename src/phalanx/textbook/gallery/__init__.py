"""The pictures of the textbook, each drawn from the code that it explains."""
