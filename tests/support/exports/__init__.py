"""Plans drawn at random for every stack, their exports, and what the frameworks themselves say about these.

`python -m support.exports` (make stacks) installs each framework in an environment of its own under .stacks/, gives
its parser drawn exports, and can record the schema that the suite holds them against instead.
"""
