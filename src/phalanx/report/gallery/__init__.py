"""What is drawn: a function for each picture, which takes its numbers from what the commands print; `registry.py`
names them all."""
