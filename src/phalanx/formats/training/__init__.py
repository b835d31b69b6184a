"""What every export of a plan shares: the subject, its reasons, groups of settings, and how they are written."""
