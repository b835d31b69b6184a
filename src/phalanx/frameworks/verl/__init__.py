"""verl: reinforcement learning under hydra's tables, of which the actor's update is read; and its fine-tuning."""
