"""Event engines: what happens over time where a formula does not reach."""
