"""The real program against the plan and against one process."""
