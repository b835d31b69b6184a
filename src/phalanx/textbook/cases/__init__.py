"""Published trainings, rules of thumb and criteria, compared with what a search chooses."""
