"""Runs that are killed, stopped, slowed, starved and lied to, and what must hold after each.

    python -m chaos [--minutes M] [--seed S]     (in tests/; `make chaos`)

cases.py lists the cases, run.py runs one and examines what it leaves behind, __main__.py draws cases until the time
is up and prints a table of counts.
"""
