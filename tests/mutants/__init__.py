"""Lines of src that are broken on purpose, one at a time, and whether a test notices: `make mutants N=300 SEED=1`.

    python -m mutants [--count N] [--seed S] [--room ROOM ...] [TEST ...]     (in tests/)

mutations.py lists what can be broken and puts drawn mutants into a copy, each behind a switch (switch.py): one run of
the tests then says which of them reach which mutant, in whatever process, and each mutant is examined in a fork of a
process that has imported everything. __main__.py draws and prints a table by room and the mutants that lived;
examining.py runs tests. Of the tools that were looked at, mutmut makes every mutant of every function and Cosmic Ray
runs one command for each: neither draws by room, nor runs only the tests of a line.
"""
