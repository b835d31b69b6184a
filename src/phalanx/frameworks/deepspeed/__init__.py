"""DeepSpeed's JSON: what it can do, read and written, with a script that it runs."""
