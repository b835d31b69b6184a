"""The real program against its StepProgram (verify.py, read first) and against one process (parity.py)."""
