"""vLLM: `vllm serve` for each worker; with separate prefill, the cache is sent over NIXL, and a router is needed."""

import json

from phalanx.serving.cost.shape import shape_of
from phalanx.serving.launch import parts
from phalanx.serving.launch.arguments import published
from phalanx.serving.launch.checkpoints import quantised_on_load, weights_of
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError


def options(plan: ServingPlan, place: parts.WorkerPlace) -> list[str]:
    """Return the options of one worker, for `vllm serve` and `dynamo.vllm`. Raises InputError for what vLLM cannot
    do."""
    w = place.workers
    if w.moe_ep > 1 and w.moe_tp > 1:
        reason = "vLLM splits experts over all ranks or not at all"
        raise InputError("workers.moe_ep", w.moe_ep, reason, "use --engine sglang, or ep = tp x attention_dp")
    out = ["--tensor-parallel-size", str(w.tp)]
    if w.pp > 1:
        out += ["--pipeline-parallel-size", str(w.pp)]
    if w.attention_dp > 1:
        out += ["--data-parallel-size", str(w.attention_dp)]
    if w.moe_ep > 1:
        out += ["--enable-expert-parallel"]
    if w.large_ep:
        kernels = "deepep_low_latency" if w.role == "decode" else "deepep_high_throughput"
        out += ["--all2all-backend", kernels, "--enable-eplb"]
        out += [
            "--eplb-config",
            json.dumps({"num_redundant_experts": parts.REDUNDANT_EXPERTS}, separators=(",", ":")),
        ]
    if parts.overlaps(plan, w):
        out += ["--enable-dbo"]
    # Both limits are of one engine core: data parallelism has one for each group.
    if most := parts.most_requests(w, w.attention_dp):
        out += ["--max-num-seqs", str(most)]
    out += ["--max-num-batched-tokens", str(w.step_tokens)]
    if tokens := parts.context(plan, w):
        out += ["--max-model-len", str(tokens)]
    out += ["--block-size", str(plan.page_tokens)]
    if plan.load.reuse and shape_of(plan.model).state:
        out.append("--enable-prefix-caching")  # such models need it up to 0.27 (engine/arg_utils.py:2598)
    if quantised_on_load(plan):
        out += ["--quantization", "fp8"]
    if plan.cache == "fp8":
        out += ["--kv-cache-dtype", "fp8"]
    if plan.draft_tokens:
        kind = "mtp" if parts.predicts_tokens(plan) else "ngram"
        method = {"method": kind, "num_speculative_tokens": plan.draft_tokens}
        out += ["--speculative-config", json.dumps(method, separators=(",", ":"))]
    if plan.adapters:
        out += ["--enable-lora", "--max-loras", str(plan.adapters)]
    return out


def launch(plan: ServingPlan) -> parts.Launch:
    """Return the commands that serve a plan with vLLM. Raises InputError for what it cannot do."""
    where, note = weights_of(plan)
    commands = []
    for place in parts.places(plan):
        shared = [*options(plan, place), "--port", str(place.port)]
        if place.workers.role != "both":
            connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
            shared += ["--kv-transfer-config", json.dumps(connector, separators=(",", ":"))]
        for rank in range(place.nodes):  # only the first node's server takes requests
            join = ["--nnodes", str(place.nodes), "--node-rank", str(rank), "--master-addr", "$HEAD"]
            words = (*shared, *(join if place.nodes > 1 else ()), *(["--headless"] if rank else ()))
            node, program = place.node + rank, ("vllm", "serve", where)
            commands.append(parts.Command(place.name, program, words, place.gpus, node, (), ("vllm",)))
    notes = [parts.caching_note(plan), *([note] if note else [])]
    if plan.draft_tokens and not parts.predicts_tokens(plan):
        notes.append("the draft is n-gram look-up here; name your draft model in --speculative-config for another")
    if len(plan.workers) == 1 and plan.workers[0].count > 1:
        notes.append("several workers: put any HTTP load balancer that counts requests under way before them")
    if len(plan.workers) > 1:
        notes.append("prefill and decode apart need a router: Dynamo's manifest (--launch dynamo) has one")
    return parts.Launch("vllm", published("vllm").version, tuple(commands), {}, tuple(notes))
