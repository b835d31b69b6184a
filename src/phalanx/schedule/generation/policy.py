"""The policy of continuous batching: which requests run, and what a step computes.

After Yu et al. 2022, "Orca", and Kwon et al. 2023, "PagedAttention":

    admission   The first waiting request starts when a slot and enough pages are free: for its longest
                context (`reserve`: nothing is ever preempted), or for its prompt.
    step        One token of every request that decodes. The rest of `chunk` goes to prompts, in order,
                cut to fit (Agrawal et al. 2023, "Sarathi"); without `mixed`, prompts have steps of their own.

Our generation (scheduler.py, with tokens and page tables) and the simulation of serving engines (which advances many
steps at once) are two executions of it; a drawn test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class BatchingPolicy:
    """Limits on what one replica or engine computes and caches. Raises InputError for numbers below 1."""

    slots: int = 16
    """Maximum number of concurrent requests."""
    chunk: int = 512
    """Maximum tokens in a step, prompts and decoding together; every decoding request has one regardless."""
    page: int = 16
    """Tokens in one page of the KV cache."""
    pages: int | None = None
    """Pages in the cache; None: enough for all concurrent requests."""
    mixed: bool = True
    """Whether prompts share a step with requests that decode; otherwise decoding waits while prompts are computed."""
    reserve: bool = True
    """Whether a request starts only when pages for its longest context are free; otherwise a full cache preempts the
    youngest request of the lowest priority, which is recomputed later."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk", "page", "pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "must be at least 1")

    def pages_of(self, tokens: int) -> int:
        """Number of pages needed for this many tokens."""
        return -(-tokens // self.page)

    def pages_to_begin(self, prompt: int, output: int, cached: int) -> int:
        """Number of pages allocated when a request of `prompt` and `output` tokens is admitted, with `cached` tokens
        to compute or receive before it decodes. The last sampled token is never computed."""
        return self.pages_of(prompt + output - 1 if self.reserve else cached)

    def admits(self, running: int, wanted: int, free: int) -> bool:
        """Whether a request that needs `wanted` of the `free` pages can start while `running` others run."""
        return running < self.slots and wanted <= free

    def prompt_budget(self, decoding: int) -> int:
        """Token budget left for prompts in a step that decodes `decoding` tokens."""
        return self.chunk - decoding if self.mixed else self.chunk
