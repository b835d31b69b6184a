"""A measuring rank with small sizes and few rounds: `python -m support.tiny_measurement ARGUMENT`.

Tests that train with its rates check what is done with them, not their accuracy.
"""

from __future__ import annotations

from phalanx.measure import collectives, kernels, microbenchmarks, steal_time, worker
from phalanx.measure import links as messages


def shorten_kernels() -> None:
    """Let this process measure kernels and compressors at few small sizes, in few rounds."""
    kernels._FULL = kernels._SMALL
    microbenchmarks._SIZES, microbenchmarks._COMPRESSIONS = (
        microbenchmarks._SIZES | {"vocab": 64, "hidden": 32, "ffn": 32, "layers": 1},
        2,
    )


def main() -> None:
    shorten_kernels()
    collectives._SIZES, collectives._ROUNDS = tuple(2**k for k in (10, 14, 18)), 2
    messages.SIZES, microbenchmarks._ROUNDS, microbenchmarks._COPIED = collectives._SIZES, 1, {"cpu": 2**16}
    worker.main()


def undisturbed() -> None:
    """Let a measurement see no other program, whose mark would stand in the notes of every command that uses it."""
    steal_time.others_s = steal_time.stolen_s = lambda: 0.0


if __name__ == "__main__":
    main()
