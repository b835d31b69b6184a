"""Lines of src that are broken on purpose, one at a time, and whether a test notices: `make mutants N=300 SEED=1`.

    python -m mutants [--count N] [--seed S] [--room ROOM ...]     (in tests/)

mutations.py lists what can be broken, covering.py which tests run a line, __main__.py draws, runs them, and prints a
table by room and the mutants that lived. Of the tools that were looked at, mutmut makes every mutant of every
function and Cosmic Ray runs one command for each: neither draws by room, nor runs only the tests of a line.
"""
