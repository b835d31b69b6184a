"""Observing one rank of each class in steps of our trainer and generator, and comparing it with its StepProgram."""
