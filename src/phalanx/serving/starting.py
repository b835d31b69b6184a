"""Why the server of a command line does not start: what its cache must hold before the first request comes."""

from phalanx.serving.lines.reading import STOPS, LinesRead
from phalanx.serving.search.copies import Copy
from phalanx.serving.simulation.engines import state_pages

_UNCOUNTED = 0.12
"""Share of a GPU's memory for weights and cache that vLLM may have taken for other things, as for an encoder of
images, before it counted pages of states: 9 to 11 % of Qwen3.8-27B's on an RTX PRO 6000 (vllm-project/recipes#831:
939 and 556 pages), 10 % of Qwen3.5-4B's in 12 GiB (73 pages)."""


def not_starting(lines: LinesRead, copy: Copy) -> tuple[str, ...]:
    """Return the caveats on why a server does not start, or may not; empty: it does."""
    return (*lines.stopped(copy.cache_tokens // copy.layout.attention_dp), *_without_states(lines, copy))


def _without_states(lines: LinesRead, copy: Copy) -> tuple[str, ...]:
    """Return a caveat if fewer recurrent states fit than requests may be under way: vLLM captures no CUDA graphs of
    decoding then (vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes; since 0.20)."""
    q, x = copy.question, copy.layout
    if not lines.checked or not q.slots or q.graphs == 0 or copy.cache_tokens <= 0:
        return ()
    whole = copy.pricing.bytes_for_weights(x)
    rooms = [whole * part - copy.pricing.weight_bytes(x) for part in (1, 1 - _UNCOUNTED)]
    pages, least = (state_pages(q.engine, q.model, max(room, 0.0), x.tp, x.pp) for room in rooms)
    if pages is None or least is None or least >= q.slots:
        return ()
    reason = f"each of {q.slots:,} requests at once needs a page of recurrent states, and the cache has"
    remedy = f"--max-num-seqs {max(1, least)}, or --enforce-eager"
    if pages < q.slots:
        return (f"{STOPS}: {reason} at most {pages:,}: {remedy}",)
    return (f"uncertain: {reason} {least:,} to {pages:,}: without them vLLM does not start: {remedy}",)
