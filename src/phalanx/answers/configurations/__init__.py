"""Configurations of other frameworks: improved, tried with changes, and written from plans."""
