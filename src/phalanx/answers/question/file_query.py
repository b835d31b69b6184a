"""The query that another framework's configuration amounts to; errors name what a price needs and it leaves open."""

import re
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from phalanx.answers.question.query import Configured, Query
from phalanx.answers.question.read import (
    UNSET,
    Reading,
    division_caveats,
    left_even,
    open_ranks,
    origins,
    read,
    value_sources,
)
from phalanx.answers.question.stated import READ_BY, job_of, model_of, options_of, strategy_of
from phalanx.cost.analytic.profile import FIELDS as CONSTANTS
from phalanx.frameworks.caveats import Caveat, assumption, nodes_of, unfilled
from phalanx.frameworks.configuration import ALL_BLOCKS, Configuration, Keys, shown
from phalanx.frameworks.deepspeed.read import GRADIENT_BYTES
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.launchers.launcher import ProgramLaunch
from phalanx.frameworks.reading.files import again, with_model_fields
from phalanx.frameworks.registry import priced_stack
from phalanx.frameworks.values import divided, truth
from phalanx.planning import lookup as names
from phalanx.schedule.pipeline.given_layout import equal_blocks, write_layers
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.cluster import presets
from phalanx.spec.cluster.chips import jax_devices
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy.spec import FIELDS, Strategy, format_field
from phalanx.spec.strategy.stack_options import StackOptions

_CONFLICTS = ("both-halves", "two-engines", "types-disagree", "batches-disagree", "pipelined-zero")
"""Lints of settings that contradict each other: a price would have to choose one of them, and the program refuses."""
_BATCH_CONFLICT = "batch-arithmetic"
"""The lint of a contradictory global batch, which the query may set."""
_OPEN_KERNEL = ("hf", "accelerate")
"""Kinds of configuration where the release chooses attention's kernel if no key names it."""
_STOPS = "as it stands the framework stops at its start"
_UNPRICED = ("bucket", "prefetch", "grad_sync", "reshard")
_SLIP = 0.92
"""SequenceMatcher's ratio from which a name is a misspelling of another, such as zero_optimisation (0.94)."""
_SHORTEST = 4
"""Letters from which a name that is one edit away is a misspelling."""


def query_by(path: Path, asked: Query, reading: Reading | None = None) -> tuple[Query, Configured]:
    """Return (query, what else the file sets): the query has the file's model, strategy, stack and precision where
    `asked` leaves them open. `reading`: the file, if it is read already. Raises InputError."""
    given = (("gpus", asked.gpus), ("batch", asked.batch), ("seq", asked.seq))
    names.require_counts(*((name, number) for name, number in given if number is not None))
    reading, asked = _in_chips(_with_sizes(reading or _read(path, asked), asked), asked)
    c, s = reading.configuration, reading.layout
    if asked.cluster is None and (kind := _kind_of(reading)) and (nodes := presets.named(kind)) is not None:
        query, configured = query_by(path, replace(asked, cluster=nodes))
        return query, replace(configured, caveats=(nodes_of(kind, nodes), *configured.caveats))
    if s.world is None and asked.gpus is None and (counted := names.gpus_in(asked.cluster)) is not None:
        return query_by(path, replace(asked, gpus=counted))
    _require_priceable(path, asked, reading)
    gpus = gpus_of(reading, asked.gpus, path)
    strategy = strategy_of(c, gpus, asked.gpus is not None)
    remarks = []
    void_zero = s.zero if s.level and s.level.state and not strategy.level.state else None
    if void_zero is not None and "zero=" not in str(asked.strategy or ""):
        remarks.append(f"zero={void_zero} of the file shards nothing over one rank: it is priced as zero=0")
    if asked.batch is None and c.kind == "megatron" and s.global_batch is None:
        reason = f"is missing: {_open(path, 'global_batch', reading)}"
        raise InputError("batch", None, reason, "say how many sequences")
    # The job, and the micro-batch that it leaves.
    batch = asked.batch or s.global_batch or (s.micro_batch or 1) * (s.accumulation or 1) * strategy.dp
    steps = s.accumulation or READ_BY[c.kind].accumulation
    if s.micro_batch is None and steps and (micro := divided(batch, strategy.dp * steps)) and micro > 1:
        strategy = replace(strategy, micro_batch=micro)
        remarks.append(f"micro_batch={micro}: {batch} sequences over dp={strategy.dp}, accumulated {steps} times")
    if asked.seq is None and s.seq is None:
        raise InputError("seq", None, f"is missing: {_open(path, 'seq', reading)}", "say how long")
    seq = asked.seq or s.seq or 1
    # The model, with what the stack makes of it.
    named = asked.model
    model, notes = (named, []) if isinstance(named, ModelSpec) else model_of(c, named)
    model = names.with_changes(model, asked.changes)
    if c.kind in _OPEN_KERNEL and model.position == "rotary" and seq > model.max_seq:
        notes = [*notes, f"sequences are longer than the model's {model.max_seq:,}: rotary positions let them"]
        model = replace(model, max_seq=seq)
    options = options_of(c, strategy)
    if options.activation_offload == ALL_BLOCKS:
        options = replace(options, activation_offload=model.layers)
    strategy = _dealt_out(strategy, c, model, options)
    strategy, options = _with_bucket(strategy, options, reading, model.hidden)
    strategy, unpriced = _priceable(strategy)
    notes = [*remarks, *notes, *unpriced]
    # The options have priority over the job's type of products.
    computed = c.job.get("compute")
    own = computed if options.products != "auto" else computed or s.precision
    if own == "fp32" and origins(c).get("precision", "").startswith("default"):
        priced = "phalanx plan --from FILE --try bf16 prices bf16"
        notes = [*notes, f"no type is set: {c.stack} computes in fp32, 4 bytes an activation; {priced}"]
    if c.kind in _OPEN_KERNEL and options.attention == "auto":
        notes += _scores(model, strategy, seq, DTYPE_BYTES[job_of(c, batch, seq).precision.compute])
    if own is not None and own not in PRECISIONS:
        notes = [*notes, f"products in {own} are priced as the device's 16-bit ones"]
    # The query, and what has no field there.
    query = replace(
        asked,
        source=None,
        files=(),
        changes=(),
        model=model,
        gpus=gpus,
        batch=batch,
        seq=seq,
        strategy=asked.strategy or str(strategy),
        stack=asked.stack or c.stack,
        precision=asked.precision or (str(own) if own in PRECISIONS else None),
    )
    asks_sp = (key for key, meaning in c.understood.items() if meaning == "strategy.sp")
    caveats = reading.caveats
    if asked.seq is None and (bounded := _bounded_by(reading)):
        caveats = (*caveats, unfilled(bounded, seq))
    if asked.strategy is None:
        caveats = tuple(dict.fromkeys((*division_caveats(c, model.layers), *_fewer_ep(s.ep, strategy), *caveats)))
    return query, Configured(
        options,
        asked.job or job_of(c, batch, seq),
        (*c.companions, *notes),
        caveats,
        reading.training,
        void_zero,
        strategy.tp == 1 and any(truth(Keys(reading.config).take(key, "")) for key in asks_sp),
        value_sources(c) if asked.strategy is None else {},
        asked.strategy is None and origins(c).get("dp", "").startswith("derived: world"),
    )


def _read(path: Path, asked: Query) -> Reading:
    """Return the reading of a query's files, of MaxText's by JAX's devices. Raises InputError."""
    paths, each = [path, *asked.files], _devices(asked)
    if each > 1 and asked.gpus:
        reading = read(paths, None, asked.gpus * each)
        if reading.configuration.kind == "maxtext":
            return reading
    return read(paths, None, asked.gpus)


def _devices(asked: Query) -> int:
    """Return the devices that JAX sees of a query's chip."""
    return 1 if asked.cluster is None else jax_devices(names.cluster_on(asked.cluster)(asked.gpus or 1).device)


def _in_chips(reading: Reading, asked: Query) -> tuple[Reading, Query]:
    """Return a reading of MaxText's, which counts JAX's devices, and its query with chips as ranks, where JAX sees
    several devices of one: replicas are of chips, each with the sequences of its devices. Raises InputError."""
    each, stated = _devices(asked), reading.layout.world
    devices = asked.gpus * each if asked.gpus else stated
    if each == 1 or reading.configuration.kind != "maxtext" or not devices:
        return reading, asked
    c = again(reading.config, reading.configuration, devices)
    s = c.layout
    if s.dp is None or s.dp % each or devices % each:
        reason = f"of {devices} devices does not divide over chips of {each}"
        raise InputError("strategy.dp", s.dp, reason, "give the strategy of chips with --strategy, without the file")
    layout = replace(
        s,
        world=devices // each,
        dp=s.dp // each,
        shard=s.shard // each if s.shard and s.shard % each == 0 else s.shard,
        micro_batch=s.micro_batch * each if s.micro_batch else s.micro_batch,
    )
    text = f"ranks are chips, of which JAX sees {each} devices each: dp={s.dp} of these is dp={layout.dp} of chips"
    caveats = (*reading.caveats, assumption(text))
    reading = replace(reading, configuration=replace(c, layout=layout), caveats=caveats)
    return reading, replace(asked, gpus=devices // each)


_FILLS = ("packing", "neat_packing", "sample_packing", "packing_samples", "pad_to_sequence_len", "pad_to_max_length")
"""Keys of a Trainer that fill every sequence, by packing or padding it to the longest length."""
_BLOCKS = ("block_size",)
"""Keys of a length into which concatenated texts are cut (transformers' run_clm.py)."""


def _bounded_by(reading: Reading) -> str:
    """Return the key of a Trainer that only bounds the length of samples; "" where every sequence is that long."""
    c, config = reading.configuration, Keys(reading.config)
    if c.kind not in _OPEN_KERNEL or any(
        truth(config.take(f"{at}{key}", "")) for key in _FILLS for at in ("", "args.", "training_arguments.")
    ):
        return ""
    named = [shown(key) for key, meaning in c.understood.items() if meaning == "job.seq"]
    cut = named and named[0].rpartition(".")[2] in _BLOCKS
    launched = reading.config.get("launched")  # another program's own
    cut = cut and (not isinstance(launched, ProgramLaunch) or "run_clm" in launched.program)
    return "" if len(named) != 1 or cut else named[0]


def _require_priceable(path: Path, asked: Query, reading: Reading) -> None:
    """Require that a configuration does not contradict itself, and that where the query does not state the layout,
    the files have it and it is modelled. Raises InputError."""
    c, s = reading.configuration, reading.layout
    for m in reading.mistakes:
        if m.name in _CONFLICTS or (m.name == _BATCH_CONFLICT and asked.batch is None):
            raise InputError(f"{path}: {m.key}", None, f"{m.problem} ({m.source})", m.remedy)
    if c.unpriced:
        remedy = "name model and strategy in place of the file"
        raise InputError("file", str(path), f"has no price: {c.unpriced}", remedy)
    _require_filled_in(path, asked, reading)
    if asked.strategy is None:
        _require_spelt(path, c)
    stated = (s.tp, s.pp, s.cp, s.micro_batch, s.global_batch, s.seq, c.spec or asked.model)
    for text in c.missing if None in stated else ():
        file, _, reason = text.partition(", ")
        reason = f"{reason.partition(':')[0]}: the layout may be in it"
        raise InputError(f"{path}: {file}", None, reason, "give it too")
    for caveat in reading.caveats:
        if caveat.kind == "not modelled" and "layout" in caveat.changes:
            reason = f"changes the layout {caveat.reason} and has no price"
            raise InputError(f"{path}: {caveat.keys[0]}", None, reason, "leave it out to price the rest")
        if caveat.reason.endswith(UNSET) and asked.strategy is None:
            called = "give a file with the line that calls it, or write the number"
            remedy = "set that variable in the file's first line, or write the number"
            remedy = called if re.search(r"\$\d", caveat.reason) else remedy
            raise InputError(f"{path}: {caveat.keys[0]}", None, caveat.reason, remedy)


def _kind_of(reading: Reading) -> str:
    """Return what a batch script or a manifest calls its GPUs; "" where it does not."""
    launched = reading.config.get("launched")
    return launched.kind if isinstance(launched, ProgramLaunch) else ""


def gpus_of(reading: Reading, gpus: int | None, path: Path) -> int:
    """Return the number of ranks to price a configuration on. Raises InputError where nothing gives it."""
    if gpus is None and reading.layout.world is None:
        reason = f"is missing: {path} leaves the number of ranks open"
        raise InputError("gpus", None, reason, f"say how many: {open_ranks(reading.configuration, reading.config)}")
    return gpus or reading.layout.world or 1


def _require_filled_in(path: Path, asked: Query, reading: Reading) -> None:
    """Require that a DeepSpeed file alone does not leave a value that a price needs to its integration (`auto`).
    Raises InputError."""
    given = {"strategy.micro_batch": asked.strategy, "job.precision": asked.precision}
    for key, meaning in reading.configuration.understood.items():
        if reading.configuration.kind == "deepspeed" and meaning in given and given[meaning] is None:
            value = Keys(reading.config).take(key, meaning)
            if value == "auto":
                reason = "is what transformers or accelerate fills in, and the file of neither is given"
                raise InputError(f"{path}: {key}", value, reason, "give it too, or write the value in its place")


def _with_sizes(reading: Reading, asked: Query) -> Reading:
    """Return a reading whose file leaves its model open with the fields of the model that the user states. Raises
    InputError."""
    c = reading.configuration
    if c.spec is not None or asked.model is not None or not asked.changes:
        return reading
    stated = names.stated_changes(asked.changes)
    config, tables = with_model_fields(reading.config, c, stated, c.layout.world or asked.gpus)
    return replace(reading, configuration=config, config=tables)


def _require_spelt(path: Path, c: Configuration) -> None:
    """Require that no key is a misspelling of one that sets the layout, whose default would then be priced. Raises
    InputError."""
    for key, near in c.unknown.items():
        folder = "deepspeed" if "deepspeed_json." in key else READ_BY[c.kind].folder
        layout = key_table(folder).layout
        name = shown(key).rpartition(".")[2].replace("-", "_")
        meant = near if near in layout else next((other for other in layout if _is_one_edit(name, other)), "")
        near_enough = _is_one_edit(name, meant) or SequenceMatcher(None, name, meant).ratio() >= _SLIP
        if meant and name != meant and near_enough:
            reason = "is not a key of the framework, and one that is sets the layout"
            raise InputError(f"{path}: {shown(key)}", None, reason, f"did you mean {layout[meant]}?")


def _is_one_edit(name: str, other: str) -> bool:
    """Return whether one letter inserted, deleted or changed, or two swapped, turn a name into another with the same
    first letter: `tp_size` is no misspelling of `pp_size`."""
    if name[:1] != other[:1] or len(name) < _SHORTEST or abs(len(name) - len(other)) > 1:
        return False
    n = next((n for n, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))
    a, b = name[n:], other[n:]
    return a != b and (a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[1::-1], a[2:]) == (b[:2], b[2:]))


def _open(path: Path, field: str, reading: Reading) -> str:
    """Return in words why a file gives no number for a field of the job: it has other words, such as a schedule of
    batches, or nothing."""
    said = {
        shown(key): str(value)[:60]
        for key, meaning in reading.configuration.understood.items()
        if meaning == f"job.{field}" and (value := Keys(reading.config).take(key, "")) not in (None, "", "auto")
    }
    what = {"global_batch": "global batch", "seq": "sequence length"}[field]
    words = ", ".join(f"{key} = {value}" for key, value in said.items())
    return f"{path} says {words}, which is no number" if said else f"{path} leaves the {what} open"


def _with_bucket(s: Strategy, o: StackOptions, reading: Reading, hidden: int) -> tuple[Strategy, StackOptions]:
    """Return (strategy, options) with the size of DeepSpeed's bucket, which has buffers, as an option. Where the file
    leaves it to transformers or accelerate (`auto`), it is the square of the hidden size (transformers,
    integrations/deepspeed.py, trainer_config_finalize; accelerate, accelerator.py, _prepare_deepspeed)."""
    c, keys = reading.configuration, Keys(reading.config)
    if not priced_stack(c.stack).constants.get("bucket_buffers"):
        return s, o
    left = any(keys.take(key, m) == "auto" for key, m in c.understood.items() if m == "strategy.bucket")
    elements = hidden**2 if left else round(s.bucket * 2**20 / GRADIENT_BYTES) if s.bucket != "auto" else 0
    return replace(s, bucket="auto"), replace(o, bucket_elements=elements)


def _priceable(s: Strategy) -> tuple[Strategy, list[str]]:
    """Return (strategy with the defaults of fields that have no price under published stacks, a note on them)."""
    changed = [n for n in _UNPRICED if getattr(s, n) != FIELDS[n].default]
    said = ", ".join(f"{n}={format_field(getattr(s, n))}{' MiB' if n == 'bucket' else ''}" for n in changed)
    notes = [f"{said} of the file has no price of its own here: the stack's is taken"] if changed else []
    defaults: dict[str, Any] = {n: FIELDS[n].default for n in changed}
    return replace(s, **defaults), notes


def _fewer_ep(ep: int | None, s: Strategy) -> tuple[Caveat, ...]:
    """Return the caveat that the price has another ep than the file, whose ep does not divide these ranks."""
    if ep in (None, s.ep):
        return ()
    reason = f"ep={s.ep} in place of ep={ep} of the file, which does not divide {s.dp * s.cp * s.tp} ranks of "
    return (Caveat("assumed", (), f"{reason}dp x cp x tp: {_STOPS}", ("layout", "time", "memory")),)


def _dealt_out(s: Strategy, c: Configuration, model: ModelSpec, options: StackOptions) -> Strategy:
    """Return a strategy with equal blocks listed for each chunk, where the file lists none and its framework divides
    them evenly; `layers=auto` would be priced with the best division."""
    chunks = len(rank_of(s))
    if not left_even(c) or s.pp == 1 or s.layers != "auto" or model.layers % chunks or options.mtp:
        return s
    return replace(s, layers=write_layers(equal_blocks(model.layers, chunks)))


def _scores(model: ModelSpec, s: Strategy, seq: int, element_bytes: int) -> list[str]:
    """Return a note of the memory that attention's scores take with the eager kernel, where it is over 1 GiB."""
    blocks = model.layers if s.recompute == "none" else 1
    kept = CONSTANTS["kept_score"] * element_bytes / 2 * blocks * model.heads * seq**2 * s.micro_batch / s.tp / s.cp
    if kept < GIB:
        return []
    more = f"{kept / GIB:.1f} GiB more and takes longer"
    return [f"attention by sdpa is assumed: `eager`, all that older releases have, keeps {more}"]
