"""Training: the loop (trainer.py, read first), one step (training_step.py), how the model gets onto its ranks
(parallelize.py), and the data it reads (data/)."""
