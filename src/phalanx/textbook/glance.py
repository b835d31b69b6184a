"""The ways to divide a training, at a glance: what each splits, keeps, sends and hides, and when it is used."""

from dataclasses import dataclass
from pathlib import Path

from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class Way:
    """A way to divide a training. A test compares its formulas, in the symbols of the note, with the ledger."""

    name: str
    splits: str
    state: str
    """Bytes of state on a rank."""
    sends: str
    volume: str
    """Bytes that a rank sends, by rings."""
    per: str
    """The unit of work in which it sends them, such as a step."""
    hidden: str
    when: str


WAYS = Rows(Path(__file__).with_suffix(".toml"), record(Way, "name"))


def glance() -> tuple[Sheet, Sheet]:
    """Tabulate the ways: what they divide and send, then what hides that and when they are used."""
    symbols = (
        "N: parameters, in bf16 with fp32 Adam; b sequences of s tokens in a micro-batch, h: width, g: width of all "
        "key heads, k: experts of a token; P, t, c, p, e: ranks of dp, tp, cp, pp, ep. State without activations; of "
        "tp, pp and ep for the part that is split"
    )
    return (
        Sheet(
            "at a glance: what is divided, and what a rank keeps and sends",
            columns("way | splits | bytes of state | bytes sent | in each"),
            [(w.name, w.splits, w.state, w.volume, w.per) for w in WAYS.values()],
            symbols,
            charted=False,
        ),
        Sheet(
            "at a glance: what is sent, what hides it, when it is used",
            columns("way | sends | hidden | when"),
            [(w.name, w.sends, w.hidden, w.when) for w in WAYS.values()],
            charted=False,
        ),
    )
