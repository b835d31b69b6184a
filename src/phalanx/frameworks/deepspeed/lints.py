"""A truth value in quotes, in DeepSpeed's tables."""

from collections.abc import Mapping

from phalanx.frameworks.configuration import Config, Configuration
from phalanx.frameworks.lints import Lint, Mistakes


def _quoted_truth(c: Config, x: Configuration) -> Mistakes:
    """A text that is not empty is true: "false" enables."""
    for base, table in (("", c), ("deepspeed.", c.get("deepspeed_json"))):
        for name in ("fp16", "bf16", "bfloat16"):
            inner = table.get(name) if isinstance(table, Mapping) else None
            enabled = inner.get("enabled") if isinstance(inner, Mapping) else None
            if isinstance(enabled, str) and enabled.lower() in ("true", "false"):
                plain = enabled.lower()
                yield f"{base}{name}.enabled", f'is the text "{enabled}", which is true', f"{plain} without quotes"


LINTS = (Lint("quoted-truth", "hiyouga/LlamaFactory#3493", _quoted_truth),)
