"""A run's own files, compared with its plan. Read diagnosis.py first."""
