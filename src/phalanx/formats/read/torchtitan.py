"""torchtitan's configuration: TOML to 0.2, YAML of its forks, flags since 0.3 (torchtitan/config/configs.py)."""

from __future__ import annotations

from phalanx.formats.read.configuration import Config, Configuration, Keys, Layout, count, divided, product, truth

_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}  # fmt: skip

_RECOMPUTED = {"FullAC": "full", "SelectiveAC": "selective", "NoAC": "none"}


def read(config: Config, world: int | None = None) -> Configuration:
    """Read torchtitan's tables. A shard degree of -1 takes what the other degrees leave of the world."""
    keys = Keys(config)
    p = "parallelism"

    def degree(name: str, old: str = "") -> int | None:
        paths = (f"{p}.{name}", *((f"{old}",) if old else ()))
        return count(keys.first(paths, "strategy", 1))

    tp = degree("tensor_parallel_degree", "training.tensor_parallel_degree")
    pp = degree("pipeline_parallel_degree", "experimental.pipeline_parallel_degree")
    cp = degree("context_parallel_degree", "experimental.context_parallel_degree")
    ep = degree("expert_parallel_degree")
    replicas = degree("data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
    shard_paths = (f"{p}.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    stated = keys.first(shard_paths, "strategy.shard", -1)
    shards = count(stated)
    if shards is None and world:
        shards = divided(world, product(tp, pp, cp, replicas))
    dp = product(replicas, shards)
    micro_paths = ("training.local_batch_size", "training.batch_size")
    micro = count(keys.first(micro_paths, "strategy.micro_batch"))
    whole = count(keys.take("training.global_batch_size", "job.global_batch"))
    offload = truth(keys.take("training.enable_cpu_offload", "offload"))
    mode = keys.take("activation_checkpoint.mode", "strategy.recompute")
    made = str(keys.take("activation_checkpoint.class", "strategy.recompute", "") or "")  # of a 0.3 registry
    if mode is None:
        mode = next((word for name, word in _RECOMPUTED.items() if made.startswith(name)), "selective")
    schedule = keys.first(
        (f"{p}.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule"), "strategy.schedule"
    )
    layout = Layout(
        world=world or product(tp, pp, cp, dp),
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=count(keys.take(f"{p}.expert_tensor_parallel_degree", "strategy.etp")),
        shard=shards,
        schedule=_SCHEDULES.get(str(schedule).lower()) if schedule else None,
        micro_batch=micro,
        accumulation=divided(whole, product(micro, dp)),
        global_batch=whole,
        seq=count(keys.take("training.seq_len", "job.seq")),
        recompute=str(mode) if mode in ("none", "selective", "full") else None,
        offload={"param": "cpu", "optimizer": "cpu"} if offload else None,
    )
    name = " ".join(str(keys.take(f"model.{n}", "model", "") or "") for n in ("name", "flavor")).strip()
    quiet, open_, unknown = keys.rest("torchtitan")
    return Configuration("torchtitan", "torchtitan", layout, keys.understood, quiet, open_, unknown, {}, name)
