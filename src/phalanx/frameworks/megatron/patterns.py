"""Megatron's hybrid patterns: `M-M*|M-ME/*E/*E` names the one sublayer of every block, in the order of the model.

    M Mamba-2   G gated delta net   * attention   + latent attention   D latent attention, sparse by an index
    - MLP       E experts           | ends a pipeline chunk            / a depth of multi-token prediction

Source: Megatron-LM d98e8a6, megatron/core/models/hybrid/hybrid_layer_allocation.py:14-28 (symbols), 183-253 (`/` and
`|`), 280-298 (what is refused), 429-446 (a pattern without `|` in a pipeline); older releases state shares of blocks
(:78-131).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.frameworks.values import count, number
from phalanx.spec.errors import InputError
from phalanx.spec.model.mechanisms import MOST_LAYERS

Flag = Callable[..., Any]
"""(name, meaning, default) -> the flag's value, noted as understood."""
WORDS = {"M": "mamba", "G": "delta", "*": "attention", "+": "attention", "D": "attention", "-": "mlp", "E": "experts"}
"""Symbol -> the sublayer's name in a ModelSpec's pattern."""
LATENT = "+D"
"""Symbols of latent attention: a pattern with one of them may not have `*`."""
FIELD = "--hybrid-layer-pattern"


@dataclass(frozen=True)
class HybridPattern:
    """A hybrid pattern."""

    symbols: str
    """A symbol for each block, without separators."""
    chunks: tuple[int, ...]
    """Blocks of each pipeline chunk; one chunk where there is no `|`."""
    depth: str = ""
    """Symbols of one depth of multi-token prediction."""
    depths: int = 0
    """Number of these depths."""

    @property
    def divided(self) -> bool:
        """Whether it divides the blocks into pipeline chunks."""
        return len(self.chunks) > 1


def parse(text: str, field: str = FIELD) -> HybridPattern:
    """Read a pattern. `field`: its flag, for errors. Raises InputError for an unknown symbol, for depths that differ,
    and for attention together with latent attention."""
    main, *depths = text.split("/")
    for i, (part, known) in enumerate(((main, f"{''.join(WORDS)}|"), *((d, "".join(WORDS)) for d in depths))):
        for symbol in part:
            if symbol not in known:
                where = "a depth of multi-token prediction" if i else "it"
                reason = f"{symbol!r} is not a symbol that {where} has"
                raise InputError(field, text[:80], reason, f"use {' '.join(known)}")
        if "*" in part and any(symbol in part for symbol in LATENT):
            reason = "has attention (*) along with latent attention (+ D), which Megatron refuses"
            raise InputError(field, text[:80], reason, "use one kind")
    symbols = main.replace("|", "")
    if not symbols or len(symbols) > MOST_LAYERS:
        raise InputError(field, text[:80], "names no block" if not symbols else f"names over {MOST_LAYERS} blocks")
    if any(depth != depths[0] for depth in depths):
        raise InputError(field, text[:80], "has depths of multi-token prediction that differ", "make them equal")
    if depths and not depths[0]:
        depths = []
    return HybridPattern(symbols, tuple(map(len, main.split("|"))), depths[0] if depths else "", len(depths))


def to_text(symbols: str, chunks: tuple[int, ...] = (), depth: str = "", depths: int = 0) -> str:
    """Return the text of a pattern; the parameters are the fields of a HybridPattern."""
    ends, parts = 0, []
    for blocks in chunks or (len(symbols),):
        parts.append(symbols[ends : ends + blocks])
        ends += blocks
    return "|".join(parts) + f"/{depth}" * depths


def from_shares(layers: int, attention: float, mlp: float) -> str:
    """Return the symbols of a pattern that is given by shares of blocks, as older releases do: attention is spread
    evenly over the Mamba-2 blocks, then MLPs over the remaining ones."""
    symbols = ["M"] * layers
    attentions = round(layers * attention)
    section = (layers - attentions) / (attentions + 1)
    x = section
    for i in range(layers):
        if x < 0.5:
            symbols[i] = "*"
            x += section
        else:
            x -= 1
    mlps = round(layers * mlp)
    ratio = (layers - attentions - mlps) / mlps if mlps else 0.0
    x = ratio
    for i in range(layers if mlps else 0):
        if symbols[i] == "M":
            if x < 0.5:
                symbols[i] = "-"
                x += ratio
            else:
                x -= 1
    return "".join(symbols)


def stated_pattern(flag: Flag, layers: int | None) -> HybridPattern | None:
    """Return the pattern that arguments state, by its flag, the older flag or shares; None for a model without one.
    `layers`: blocks of the model, None: not stated. Raises InputError for a pattern that cannot be read."""
    flag("is_hybrid_model", "model.pattern")
    given = {name: flag(name, "model.pattern") for name in ("hybrid_layer_pattern", "hybrid_override_pattern")}
    texts = {name: str(v) for name, v in given.items() if v not in (None, True) and "$" not in str(v)}
    if len(texts) == 2:
        reason = "and --hybrid-override-pattern, its older name, are both given"
        raise InputError(FIELD, next(iter(texts.values()))[:80], reason, "leave one out")
    attention, mlp = (number(flag(f"hybrid_{n}_ratio", "model.pattern"), 0.0) for n in ("attention", "mlp"))
    depths, depth = count(flag("mtp_num_layers", "options.mtp")), flag("mtp_hybrid_override_pattern", "options.mtp")
    if texts:
        name, text = next(iter(texts.items()))
        if depth and depths and "/" not in text:
            text += f"/{depth}" * min(depths, 100)
        return parse(text, f"--{name.replace('_', '-')}")
    if (not attention and not mlp) or layers is None or layers > MOST_LAYERS:
        return None
    if not (0 <= attention <= 1 and 0 <= mlp <= 1 and attention + mlp <= 1):
        raise InputError(
            "--hybrid-attention-ratio", attention, f"with --hybrid-mlp-ratio {mlp:g} is not a share of 1"
        )
    return parse(from_shares(layers, attention, mlp))
