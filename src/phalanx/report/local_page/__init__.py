"""What `phalanx ui` does: answers.py prices in processes that can be stopped, server.py serves the page."""
