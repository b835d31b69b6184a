"""Tables of decoding: the size of the cache, its roofline, and the effects of tensor and pipeline parallelism."""

from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.memory.cache import latents
from phalanx.planning.tables.table import Sheet, columns
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.cost.shape import shape_of
from phalanx.serving.cost.step import BYTES, INPUT_BYTES, STATE_BYTES, token_bytes
from phalanx.serving.simulation.engines import MULTIPLIED_AS
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Index
from phalanx.spec.model.spec import ModelSpec

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CARDS = {"bf16": 2, "fp8": 1}


def cache(model: ModelSpec, seq: int) -> Sheet:
    """Tabulate a model's KV cache by number type, and for comparison with keys and values of all heads."""
    m, layers, all_layers, all_heads = shape_of(model), Counter[str](), Counter[str](), Counter[bool]()
    for block, n in architecture(model).kinds.items():
        for s in block.sublayers:
            if (attend := s.first(Attend)) is not None:
                text, of_all = _elements(s, attend)
                layers[text] += n
                all_layers[of_all] += n
                all_heads[attend.window is not None] += n * attend.y.dim.count * (attend.key + attend.value)
    actual, whole = ("latents", "as keys and values of all heads") if m.latent_layers else _GROUPED
    sizes = [(actual, _kinds(layers), m.cache, m.window_cache)]
    if all_heads.total() > m.cache + m.window_cache:
        sizes.append((whole, _kinds(all_layers), all_heads[False], all_heads[True]))
    states = round(STATE_BYTES * m.state + INPUT_BYTES * m.inputs)
    rows = []
    for title, elements, width, local in sizes:
        for dtype, size in _CARDS.items():
            token = float(token_bytes(m, size)) if title == actual else float(size * width)
            request = token * seq + size * local * min(seq, m.window) + states
            rows.append((title, elements, dtype, token + size * local, request, (80e9 / request)))
    return Sheet(
        f"KV cache: {layers.total()} layers, {seq:,} tokens a request",
        columns(
            "cache | elements a layer | type | per token [bytes] | per request [bytes] | requests in 80 GB [count]"
        ),
        rows,
        "per token: elements x layers x bytes of the type; weights take room too"
        + (f"; per request: layers with a window keep no more than {m.window:,} tokens" if m.window_cache else "")
        + (f"; per request: with {states:,.0f} bytes of recurrent states" if states else ""),
    )


_GROUPED = ("unchanged", "without grouped queries")


def _elements(s: Sublayer, attend: Attend) -> tuple[str, str]:
    """Return, in words, the elements that a layer caches of a token, and those with keys and values of all heads."""
    heads, (rank, rope), index = attend.y.dim.count, latents(s), s.first(Index)
    if rank:
        return f"{rank} + {rope}" + (f" + {index.each}" if index is not None else ""), f"{heads} heads"
    each = (
        f"2 x {{}} heads x {attend.key}"
        if attend.key == attend.value
        else f"{{}} heads x {attend.key + attend.value}"
    )
    return each.format(attend.kv.count), each.format(heads)


def _kinds(layers: Mapping[str, int]) -> str:
    """Return the kinds of layers in words, with the number of each if there are several."""
    return next(iter(layers), "") if len(layers) < 2 else ", ".join(f"{n} of {text}" for text, n in layers.items())


def room(price: ServingPrice, seq: int, layouts: Sequence[ServingLayout]) -> Sheet:
    """Tabulate the memory of a GPU by layout: weights, cache, and the requests of `seq` tokens that fit."""
    rows = []
    for x in layouts:
        tokens = price.cache_tokens(x, seq)
        split = f"tp={x.tp},pp={x.pp}" if x.attention_dp == 1 else f"tp={x.tp},dp={x.attention_dp},ep={x.moe_ep}"
        fits = (tokens, tokens // seq, tokens // seq / x.gpus)
        rows.append((split, x.gpus, price.weight_bytes(x), price.cache_bytes_per_gpu(x), *fits))
    device, m = price.cluster.device, price.shape
    whole = 0.0 if price.weights == "bf16" else m.whole + m.whole_mlp + m.whole_expert
    share = whole / (m.attention + m.mlp + m.expert)
    return Sheet(
        f"one copy on {device.name}, weights in {price.weights}, cache in {price.cache}",
        columns(
            "layout | GPUs [count] | weights a GPU [bytes] | cache of a token [bytes] | tokens that fit [count]",
            f"requests of {seq:,} [count]",
            "per GPU [count]",
        ),
        rows,
        f"weights and cache have {price.room(layouts[0])}: --memory sets the share. "
        "cache of a token: on a GPU that has it, in all layers; KV heads are duplicated where tp is more than "
        "their number. Layers with a window keep no more of a request than the window, so that more tokens fit"
        + (f". {share:.0%} of the layers' weights stay in 16 bits, as the checkpoint keeps them" if share else ""),
    )


def intensity(price: ServingPrice, seq: int) -> Sheet:
    """Tabulate decoding by batch, on one GPU with unlimited memory: intensity and bound of weights and attention."""
    x, m = ServingLayout(), price.model
    peak, peak_16, memory = _peaks(price)
    ridge = peak / memory
    # A cached element is multiplied for every query head that shares it: once for its score, once as a value.
    shape = price.shape
    width, cached = shape.decode_width + shape.window_width, shape.cache + shape.window_cache
    attention = 4 * width / max(cached, 1) / BYTES[price.cache]
    rows = []
    for b in BATCHES:
        parts = price.parts(x, 0, 0, b, b * seq)
        dense, share = 2 * b / BYTES[price.weights], 1.0
        if m.experts is not None:  # of the experts that are read, each token uses top_k
            used = m.experts.top_k / m.experts.count
            share = used / (1 - (1 - used) ** b)
        total = float(sum(parts.values()))
        experts = () if m.experts is None else (dense * share,)
        bound = "compute" if dense * share >= ridge else "memory"
        rows.append((b, dense, *experts, attention, bound, float(parts["cache"]) / total, total, b / total))
    batch = ridge * BYTES[price.weights] / 2
    note = (
        f"the chip's ridge is {ridge:,.0f} FLOP per byte with {price.weights} weights: products with them stop being "
    )
    note += f"bound by memory at {batch:,.0f} tokens a step"
    if m.experts is not None:
        note += f", the products of experts, of which a token uses {m.experts.top_k} in {m.experts.count}, at "
        note += f"{batch * m.experts.count / m.experts.top_k:,.0f}"
    bound = "compute" if attention >= peak_16 / memory else "memory"
    note += (
        f". Attention is bound by {bound} at any batch: {attention:,.0f} of {peak_16 / memory:,.0f} in 16 bits, for "
    )
    note += "each request has a cache of its own"
    return Sheet(
        f"decoding with {seq:,} tokens of context: FLOP per byte by batch",
        columns(
            "batch [count] | weights [count]",
            *(["experts [count]"] if m.experts is not None else []),
            "attention [count]",
            "weights bound by" if m.experts is None else "experts bound by",
            "cache of the step [share] | step [s] | tokens/s [count]",
        ),
        rows,
        note + ". Step and tokens/s: of one GPU with room for all of it",
    )


def _peaks(price: ServingPrice) -> tuple[float, float, float]:
    """Return (FLOP/s of products with the weights' type, FLOP/s in 16 bits, bytes/s), by datasheet."""
    s = system_of(price.cluster)
    peak = {"half": s.peak_bf16, "fp8": s.peak_fp8, "fp4": s.peak_fp4}[MULTIPLIED_AS[price.weights].peak or "half"]
    return float(peak), float(s.peak_bf16), price.cluster.device.memory_bandwidth_bytes_per_s


def collectives(price: ServingPrice, degrees: Sequence[int]) -> Sheet:
    """Tabulate the all-reduces of a decoding step by tensor parallelism and batch, with the links that they use."""
    m, times, rows = price.model, round(2 * price.shape.layers), []
    for tp in degrees:
        for b in (1, 16, 64, 256):
            size = b * m.hidden * 2.0
            each = float(price.all_reduce_s(tp, size))
            step = float(price.seconds(ServingLayout(tp, 1, 1, tp, 1), 0, 0, b, b * 1000))
            rows.append((tp, _link(price, tp), b, size, times, each, times * each, times * each / step))
    return Sheet(
        "all-reduces of a step that decodes",
        columns(
            "tp [count] | links | batch [count] | payload [bytes] | times [count] | one [s] | together [s] "
            "| of the step [share]"
        ),
        rows,
        "two a layer, after attention and after the MLP; of the step: with 1,000 tokens of context",
    )


def _link(price: ServingPrice, ranks: int) -> str:
    tiers = price.cluster.tiers
    return next((t.name for t in tiers if t.ranks >= ranks), tiers[-1].name)


def tensor_pays(price: ServingPrice, seq: int, degrees: Sequence[int]) -> Sheet:
    """Tabulate, for each doubling of tensor parallelism, the batches at which it shortens the time per token: with
    one copy, and compared with two copies that share the requests."""
    rows = []
    for tp in degrees[1:]:

        def step(t: int, batch: int) -> float:
            return float(price.seconds(ServingLayout(t, 1, 1, t, 1), 0, 0, batch, batch * seq))

        sooner = [b for b in BATCHES if step(tp, b) < step(tp // 2, b)]
        # Two copies of half the degree share the requests, so that the GPUs are equal.
        together = [b for b in BATCHES if b > 1 and step(tp, b) < step(tp // 2, b // 2)]
        one, many = step(tp // 2, 1) / step(tp, 1), step(tp // 2, 256) / step(tp, 256)
        rows.append((f"{tp // 2} -> {tp}", _link(price, tp), one, many, _span(sooner), _span(together)))
    return Sheet(
        f"when twice the tensor parallelism pays, {seq:,} tokens of context",
        columns(
            "tp | links | speed-up at 1 [count] | at 256 [count] | a token comes sooner at batches "
            "| sooner than on two copies of half"
        ),
        rows,
        "speed-up: of a step that decodes; two copies: the same requests on as many GPUs, half on each. Weights "
        "need not fit here",
    )


def _span(batches: list[int]) -> str:
    if not batches:
        return "none"
    return f"{batches[0]:,} and more" if batches[-1] == BATCHES[-1] else f"{batches[0]:,} to {batches[-1]:,}"


def tensor_or_pipeline(price: ServingPrice, seq: int, gpus: Sequence[int]) -> Sheet:
    """Tabulate one request on more GPUs, by tensor parallelism and by a pipeline."""
    rows = []

    def ttft_tpot(x: ServingLayout) -> tuple[float, float]:
        return float(price.seconds(x, seq, 0, 0, 0)), float(price.seconds(x, 0, 0, 1, seq))

    base = ttft_tpot(ServingLayout())
    for n in gpus:
        tp, pp = ttft_tpot(ServingLayout(n, 1, 1, n, 1)), ttft_tpot(ServingLayout(1, n))
        rows.append((n, tp[0], pp[0], tp[1], pp[1], base[1] / tp[1], base[1] / pp[1]))
    return Sheet(
        f"one request of {seq:,} tokens: tensor against pipeline",
        columns(
            "GPUs [count] | prefill, tp [s] | prefill, pp [s] | a token, tp [s] | a token, pp [s] "
            "| tp faster by [count] | pp faster by [count]"
        ),
        rows,
        "each stage of a pipeline waits for the one before: one request is on one stage at a time, and all weights "
        "are still read one after the other. tp reads a part of each on every GPU, and pays two all-reduces a layer",
    )
