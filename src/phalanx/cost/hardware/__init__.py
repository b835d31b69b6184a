"""Hardware as the analytic engine reads it: rates of a chip and its links (system.py), rows as columns
(columns.py)."""
