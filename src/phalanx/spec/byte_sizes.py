"""Sizes and counts in human-readable form: 100MB is 1e8 bytes, 64KiB is 65,536; 8k tokens are 8,192."""

import re

from phalanx.spec.errors import InputError

_SCALE = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str, field: str = "bytes") -> float:
    """Parse `4096`, `100MB`, `64KiB` or `1.5 GiB` into bytes. Raises InputError naming `field`; 0 is refused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip(), re.IGNORECASE)
    if not match or not 0 < float(match[1]) < 1e18:
        raise InputError(field, text, "is not a size", "write 4096, 100MB or 64KiB")
    return float(match[1]) * _SCALE[(match[2] or "").upper()]


def parse_count(text: str) -> int | None:
    """Parse 8192, 8,192 or 8k, which are equal: the field counts tokens, GPUs and sequences in powers of two. Return
    None for any other text."""
    match = re.fullmatch(r"([+-]?(?:\d+|\d{1,3}(?:[,_]\d{3})+))([km]?)", text.strip(), re.IGNORECASE)
    scale = {"": 1, "k": 2**10, "m": 2**20}
    return int(re.sub("[,_]", "", match[1])) * scale[match[2].lower()] if match else None


def write_bytes(size: float) -> str:
    """Write bytes as `2.8 MiB`: three significant digits, in powers of 1024."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            scaled = size / scale
            return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:,.0f} {unit}"
    return f"{size:.0f} B"
