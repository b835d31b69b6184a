"""Answers of a search over strategies: its wishes, its plan, and what a whole training takes."""
