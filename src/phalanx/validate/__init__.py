"""Published measurements, and how far predictions are from them. No torch."""
