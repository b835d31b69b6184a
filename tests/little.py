"""A measuring rank that takes little time: `python -m little ARGUMENT`, like any other but for sizes and rounds.

Who trains by its rates in a test asks what is done with them, not how good they are."""

from __future__ import annotations

from phalanx.measure import coding, figures, kernels, links, messages, worker


def main() -> None:
    kernels._FULL = kernels._SMALL
    coding._SIZES, coding._ROUNDS = coding._SIZES | {"vocab": 64, "hidden": 32, "ffn": 32, "layers": 1}, 2
    links._SIZES, links._ROUNDS = tuple(2**k for k in (10, 14, 18)), 2
    messages.SIZES, figures._ROUNDS, figures._COPIED = links._SIZES, 1, 2**16
    worker.main()


if __name__ == "__main__":
    main()
