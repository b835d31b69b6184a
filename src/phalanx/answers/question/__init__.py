"""Questions as they are typed or called, and read once for every command: query.py, question.py."""
