"""The proof of generation: its real steps, compared with the predicted ones."""
