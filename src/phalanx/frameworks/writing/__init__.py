"""Programs and files that a plan is written as."""
