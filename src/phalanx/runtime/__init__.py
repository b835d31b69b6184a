"""The running side: processes, communication, parallel engines."""
