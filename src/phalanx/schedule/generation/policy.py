"""The policy of continuous batching: which requests run, and what a step computes.

After Yu et al. 2022, "Orca", and Kwon et al. 2023, "PagedAttention":

    admission   The first request that waits begins when a slot is free and so are its pages: those of its longest
                context (`reserve`: nothing is ever preempted), or those of its prompt.
    step        One token of every request that decodes. What that leaves of `chunk` goes to prompts, in order, which
                are cut to fit (Agrawal et al. 2023, "Sarathi"); without `mixed`, prompts have steps of their own.

Our generation (scheduler.py, with tokens and page tables) and the simulation of serving engines (which advances many
steps at once) are two executions of it; a drawn test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class BatchingPolicy:
    """What one replica or engine computes and caches at most. Raises InputError for numbers below 1."""

    slots: int = 16
    """Requests that run at once."""
    chunk: int = 512
    """Tokens of a step, prompts and decoding together; every request that decodes has one in any case."""
    page: int = 16
    """Tokens of a page of the KV cache."""
    pages: int | None = None
    """Pages of the cache; None: as many as the requests need that run at once."""
    mixed: bool = True
    """Whether prompts share a step with requests that decode; otherwise those wait while prompts are computed."""
    reserve: bool = True
    """Whether a request begins only when there are pages to its end; otherwise a full cache preempts the youngest
    request of the lowest priority, which is computed again later."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk", "page", "pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "must be at least 1")

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page)

    def pages_to_begin(self, prompt: int, output: int, cached: int) -> int:
        """Pages that a request takes when it is admitted, of `prompt` and `output` tokens, with `cached` tokens to
        compute or receive before it decodes. The last token that is sampled is never computed."""
        return self.pages_of(prompt + output - 1 if self.reserve else cached)

    def admits(self, running: int, wanted: int, free: int) -> bool:
        """Whether a request that wants pages can begin next to `running` others."""
        return running < self.slots and wanted <= free

    def prompt_budget(self, decoding: int) -> int:
        """Tokens of prompts in a step in which requests decode `decoding` tokens."""
        return self.chunk - decoding if self.mixed else self.chunk
