"""Training frameworks: a folder each, with what it can do, and its configuration read, written and checked."""
