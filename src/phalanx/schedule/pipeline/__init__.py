"""Pipeline schedules: which rank runs which chunk of the model when (read schedules.py first), the sends and receives
in between, their proof, and what each rank holds under a strategy (stages.py)."""
