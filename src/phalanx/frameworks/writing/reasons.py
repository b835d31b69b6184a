"""The reasons for a plan: a sentence or two per group of settings, with the plan's own figures."""

from phalanx.frameworks.writing.subject import Subject
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.strategy.mesh import mesh

GIB = 2**30


def _seconds(x: Subject, *terms: str) -> str:
    """Say what terms of the predicted step take, where the plan has them."""
    known = x.plan.prediction.get("terms_s") or {}
    total, step = sum(known.get(t, 0.0) for t in terms), x.plan.prediction.get("step_time_s")
    if not step or not any(t in known for t in terms):
        return ""
    return f" Predicted: {total:.3g} s of a step of {step:.3g} s."


def _span(x: Subject, axis: str) -> str:
    return "inside a node" if mesh(x.s).within(axis, x.gpus_per_node) else "across nodes"


def layout(x: Subject) -> str:
    """Say how the world is divided."""
    s = x.s
    factors = " x ".join(f"{axis} {getattr(s, axis)}" for axis in s.order.split("/") if getattr(s, axis) > 1)
    step, used = x.plan.prediction.get("step_time_s"), x.plan.prediction.get("memory_bytes")
    line = f"{s.world} ranks" + (f" = {factors}, outermost first" if factors else "")
    if step and used:
        line += f"; predicted: {step:.4g} s a step, {used / GIB:.1f} GiB of {usable(x):.1f} GiB a GPU"
    return line + "."


def usable(x: Subject) -> float:
    """Return the memory that is left for a job, in GiB."""
    return x.cluster.device.usable_bytes / GIB


def tensor(x: Subject) -> str:
    """Say why tensor parallelism has its degree."""
    s = x.s
    if s.tp == 1:
        return "No tensor parallelism: every GPU has whole matrices."
    how = "Each block's activations are gathered and scattered by tokens" if s.sp else "Each block is all-reduced"
    return f"{how} over {s.tp} GPUs {_span(x, 'tp')}.{_seconds(x, 'tp')}"


def context(x: Subject) -> str:
    """Say how long sequences are split."""
    s = x.s
    if s.cp == 1:
        return f"Sequences of {x.job.seq:,} tokens are not split."
    parts = [f"all-to-alls over {s.ulysses}"] * (s.ulysses > 1)
    parts += [f"{'all-gathers' if x.options.context == 'all_gather' else 'a ring'} over {s.ring}"] * (s.ring > 1)
    return (
        f"Sequences of {x.job.seq:,} tokens are split over {s.cp} GPUs by {' and '.join(parts)}.{_seconds(x, 'cp')}"
    )


def pipeline(x: Subject) -> str:
    """Say how the model is cut into stages."""
    s = x.s
    if s.pp == 1:
        return "No pipeline: every GPU runs all blocks."
    bubble = x.plan.prediction.get("bubble_fraction")
    line = f"{x.model.layers} blocks in {len(rank_of(s))} chunks over {s.pp} stages, {x.micro_batches} micro-batches"
    line += "; chunks differ by a block or more, to balance the head" if not x.even else ""
    return line + (f". Predicted bubble: {bubble:.1%}." if bubble is not None else ".")


def data(x: Subject) -> str:
    """Say what is sharded over the data axis."""
    s = x.s
    if s.dp * s.cp == 1:
        return "One replica."
    over = f" over {s.shards} ranks" if s.level.state else ""
    copies = f", {s.dp_replicate} copies of it" if s.level.state and s.dp_replicate > 1 else ""
    return f"{s.dp} replicas; ZeRO-{s.zero} shards {s.level.words}{over}{copies}.{_seconds(x, 'dp')}"


def experts(x: Subject) -> str:
    """Say where experts are."""
    s, e = x.s, x.model.experts
    assert e is not None
    where = f"over {s.ep} GPUs {_span(x, 'ep')}, {e.count // s.ep} each" if s.ep > 1 else "on every GPU"
    return f"{e.count} experts a block, {e.top_k} of them per token, {where}.{_seconds(x, 'ep')}"


def batch(x: Subject) -> str:
    """Say how a step's sequences are divided."""
    s = x.s
    return (
        f"{x.job.global_batch:,} sequences a step = {s.micro_batch} a micro-batch x {x.micro_batches} "
        f"micro-batches x {s.dp} replicas."
    )


def recomputation(x: Subject) -> str:
    """Say what is recomputed."""
    if x.s.recompute == "none":
        return "Nothing is recomputed: what the backward pass needs fits in memory."
    used = (x.plan.prediction.get("memory_terms") or {}).get("activations")
    kept = f" Activations then take {used / GIB:.1f} GiB." if used else ""
    return f"Recomputed in the backward pass, to save memory: {x.s.recompute}.{kept}{_seconds(x, 'recompute')}"


def precision(x: Subject) -> str:
    """Say in which types the step computes."""
    products = x.options.products
    how = f"; products in {products}" if products != "auto" else ""
    return f"Parameters and activations in {x.compute}{how}; gradients and master weights as the plan counts them."
