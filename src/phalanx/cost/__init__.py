"""How long and how large: arithmetic on terms. No torch."""
