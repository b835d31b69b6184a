"""Teaching: exercises with computed answers, published trainings studied again, and a gallery of pictures."""
