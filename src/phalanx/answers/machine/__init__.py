"""This machine and others: what they have, what was measured on them, and what measured steps say."""
