"""What GPU-hours cost in money, energy and carbon: dated tables with their sources, which a user's own
values override."""
