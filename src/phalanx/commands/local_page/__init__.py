"""What `phalanx ui` does: answers.py prices a question in a process that can be stopped, server.py serves the page."""
