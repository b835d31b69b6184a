"""Cost of GPU-hours in money, energy and carbon: dated tables with their sources, which a user's values override."""
