"""The questions as tools for agents (MCP), each call a process of its own."""
