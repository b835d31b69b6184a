"""Which mutant is on, and which have been reached: read and written by all processes of a run of tests.

It is copied beside phalanx, whose drawn lines call `switch`. The file `switches` beside it holds a byte for each
mutant that says whether its place was reached, then one for each that says whether it is on.
"""

import mmap
from pathlib import Path

with Path(__file__).with_name("switches").open("r+b") as file:
    switches = mmap.mmap(file.fileno(), 0)
COUNT = len(switches) // 2


def switch(number: int) -> int:
    """Return whether a mutant is on, having noted that its place was reached."""
    switches[number] = 1
    return switches[COUNT + number]
