"""How long the documents of a training are, and how they become sequences.

lognormal:1200,1.1               documents of 1,200 tokens in the mean, sigma of their logarithm 1.1
lengths.txt                      one length a line
+padded                          a document a sequence, padded to the full length (the default)
+longest                         padded to the longest of its micro-batch
+packed, +packed:32k             several documents a sequence, attention inside each
+balanced                        sequences dealt to ranks and micro-batches by their cost
+dynamic, +dynamic:8k            a document over as few ranks as can hold it, at most 8k tokens each (dynamic.py)
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from phalanx.schedule.packing import Ints
from phalanx.spec.documents import read_packed
from phalanx.spec.errors import InputError, nearest

Way = Literal["padded", "longest", "packed", "dynamic"]
WAYS: tuple[Way, ...] = get_args(Way)
_WORDS = (*WAYS, "balanced")
_LOGNORMAL = re.compile(r"lognormal:(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)")
_SLOT = re.compile(r"(packed|dynamic):(\d+)(k?)", re.IGNORECASE)
_MOST_DOCUMENTS, _LONGEST = 2_000_000, 100_000_000
_SAMPLE = 20_000
_EXAMPLE = "e.g. lognormal:1200,1.1+packed or lengths.txt+packed+balanced"


@dataclass(frozen=True)
class Lengths:
    """A distribution of documents' tokens, and how they become sequences."""

    line: str
    mean: float = 0.0
    sigma: float = 0.0
    """Of the logarithm."""
    known: tuple[int, ...] = ()
    """Lengths that a file lists, in place of mean and sigma."""
    way: Way = "padded"
    slot: int | None = None
    """If stated: tokens of a packed sequence, or (dynamic) the most tokens of a document that a rank holds."""
    balanced: bool = False

    def document(self, seq: int) -> int:
        """Return the length in tokens of equal documents with as many keys per query on average, if attention stays
        inside documents (packed, dynamic); else 0. `seq`: the longest length."""
        if self.way not in ("packed", "dynamic"):
            return 0
        lengths = np.minimum(self.draw(np.random.default_rng(0), _SAMPLE), seq).astype(float)
        return max(round(float((lengths**2).sum() / lengths.sum())), 1)

    def draw(self, random: np.random.Generator, count: int) -> Ints:
        """Draw lengths in tokens, (count,)."""
        if self.known:
            return random.choice(np.array(self.known, dtype=np.int64), count)
        if not self.mean:  # full sequences
            return np.full(count, _LONGEST, dtype=np.int64)
        logarithms = random.normal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.rint(np.exp(np.minimum(logarithms, 18.0))), 1, _LONGEST).astype(np.int64)


def parse_lengths(line: str) -> Lengths:
    """Parse `SOURCE+WORD+WORD`; `packed:32k` alone is full sequences. Raises InputError."""
    first, *words = (part.strip() for part in line.split("+"))
    if _SLOT.fullmatch(first) or first in _WORDS:
        words = [first, *words]
        lengths = Lengths(line)
        if not _SLOT.fullmatch(first):
            raise InputError("lengths", line, "names no documents", _EXAMPLE)
    elif match := _LOGNORMAL.fullmatch(first):
        lengths = Lengths(line, float(match[1]), float(match[2]))
        if not 1 <= lengths.mean <= _LONGEST or lengths.sigma > 5:
            raise InputError("lengths", first, "is no mean from 1 to 10^8 and sigma up to 5", _EXAMPLE)
    elif first.startswith("lognormal"):
        raise InputError("lengths", first, "is no mean and sigma", _EXAMPLE)
    else:
        lengths = Lengths(line, known=_in_file(Path(first)))
    for word in words:
        slot = _SLOT.fullmatch(word)
        if slot:
            way = WAYS[WAYS.index(slot[1].lower())]
            lengths = replace(lengths, way=way, slot=int(slot[2]) * (1024 if slot[3] else 1))
        elif word == "balanced":
            lengths = replace(lengths, balanced=True)
        elif word in WAYS:
            lengths = replace(lengths, way=word)
        else:
            raise InputError("lengths", word, "is no way to make sequences", nearest(word, _WORDS))
    if lengths.balanced and lengths.way in ("padded", "dynamic"):
        reason = "which cost alike" if lengths.way == "padded" else "whose ranks share documents by cost anyway"
        raise InputError("lengths", line, f"deals {lengths.way} sequences, {reason}", "add packed or longest")
    return lengths


def _in_file(path: Path) -> tuple[int, ...]:
    """Read a file of one length per line, after at most one heading. Raises InputError."""
    rows = [line.strip() for line in read_packed(path, "lengths").splitlines() if line.strip()]
    for place, row in enumerate(rows):
        if not row.isdecimal() and place:
            raise InputError("lengths", row[:40], f"is no number of tokens, in line {place + 1} of {path}")
    known = tuple(int(row[:10]) for row in rows if row.isdecimal())  # of more digits, it is too long all the same
    if not known or not all(1 <= length <= _LONGEST for length in known) or len(known) > _MOST_DOCUMENTS:
        reason = f"must list 1 to {_MOST_DOCUMENTS:,} lengths of 1 to {_LONGEST:,} tokens, one a line"
        raise InputError("lengths", str(path), reason)
    return known
