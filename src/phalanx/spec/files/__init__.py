"""The files that a user and a run keep: the TOML job file (job_file.py, read it first) and plan.json (plan.py)."""
