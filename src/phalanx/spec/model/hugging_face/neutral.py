"""Keys of a config.json that a reader need not know, and names that it must not pass over.

A key that a row does not read is one of three kinds: known here to change no layer; named like what changes layers,
so that a config with it is refused; or anything else, such as what a tool notes about itself.
"""

import re
from pathlib import Path

NEUTRAL = frozenset(Path(__file__).with_suffix(".txt").read_text().split())
"""They change no size and no cost, or are read by every row. Multi-token prediction is among them: it is left out of
totals, as transformers leaves it out, and a note says so."""

STRUCTURAL = re.compile(
    r"^(?!.*_eps(ilon)?$).*"
    r"(heads?(_|$)|layers?(_|$)|(_|^)(dim|rank|size|width|ratio|factor|interval|freq|period|offset)(_|s?$)"
    r"|expert|moe|norm|window|attn|attention|mlp|ffn|mamba|conv|ssm|state|linear|delta|lightning|index|compress"
    r"|(^|_)hc_|altup|laurel|gram|latent|lora|bias|gate|residual|block|pattern|parallel|shared|sink|loop|recur"
    r"|memory|kv_|chunk)"
)
"""Names of what changes layers, in the vocabulary of the configurations that transformers 5 has."""
