"""Shell scripts and command lines, read and never run."""
