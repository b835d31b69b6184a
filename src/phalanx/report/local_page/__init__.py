"""The page of `phalanx ui`: answers.py prices in processes that can be stopped, server.py serves the page."""
