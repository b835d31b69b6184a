"""An existing tokenizer.json, opened and checked against a model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.spec.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def open_tokenizer(path: Path, vocab: int, field: str) -> Tokenizer:
    """Open a tokenizer, without truncation and padding. Raises InputError, about `field`, if the file cannot be read,
    is not a tokenizer.json, or has a token whose id is not below `vocab`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise InputError(field, str(path), f"cannot be read ({error.strerror})") from None
    except Exception as error:  # the library raises nothing more special
        raise InputError(field, str(path), f"is not a tokenizer.json ({error})") from None
    size = max(tokenizer.get_vocab_size(), max(tokenizer.get_vocab().values(), default=-1) + 1)
    if size > vocab:
        reason = f"has {size} entries, model.vocab is {vocab}"
        raise InputError(field, str(path), reason, "use the model's own tokenizer, or raise model.vocab")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
