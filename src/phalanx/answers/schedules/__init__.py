"""Answers on schedules of collectives and of pipelines."""
