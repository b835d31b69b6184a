"""The placement of a job's ranks on free GPUs: the search for it, its price, and the files that launch it."""
