"""SGLang: `sglang.launch_server` for each worker, and its router in front of several workers."""

from phalanx.serving.launch import parts
from phalanx.serving.launch.arguments import published
from phalanx.serving.launch.checkpoints import quantised_on_load, weights_of
from phalanx.serving.plan_file import ServingPlan, Workers


def options(plan: ServingPlan, place: parts.WorkerPlace) -> list[str]:
    """Return the options of one worker, for `sglang.launch_server` and `dynamo.sglang`."""
    w = place.workers
    out = ["--tp-size", str(w.tp * w.attention_dp)]
    if w.pp > 1:
        out += ["--pp-size", str(w.pp)]
    if w.attention_dp > 1:
        out += ["--dp-size", str(w.attention_dp), "--enable-dp-attention"]
    if w.moe_ep > 1:
        out += ["--ep-size", str(w.moe_ep)]
    if w.large_ep:
        mode = {"prefill": "normal", "decode": "low_latency", "both": "auto"}[w.role]
        out += ["--moe-a2a-backend", "deepep", "--deepep-mode", mode, "--moe-dense-tp-size", "1"]
        out += ["--enable-dp-lm-head", "--enable-eplb", "--ep-num-redundant-experts", str(parts.REDUNDANT_EXPERTS)]
    if parts.overlaps(plan, w):
        out += ["--enable-two-batch-overlap"]
    if most := parts.most_requests(w):
        out += ["--max-running-requests", str(most)]
    out += ["--chunked-prefill-size", str(w.step_tokens * w.attention_dp)]  # which the groups share
    if tokens := parts.context(plan, w):
        out += ["--context-length", str(tokens)]
    out += ["--page-size", str(plan.page_tokens)]
    if quantised_on_load(plan):
        out += ["--quantization", "fp8"]
    elif plan.weights == "nvfp4":
        out += ["--quantization", "modelopt_fp4"]
    if plan.cache == "fp8":
        out += ["--kv-cache-dtype", "fp8_e4m3"]
    if plan.draft_tokens and parts.predicts_tokens(plan):
        out += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(plan.draft_tokens)]
        out += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(plan.draft_tokens + 1)]
    elif plan.draft_tokens:
        out += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(plan.draft_tokens)]
    if plan.adapters:
        out += ["--enable-lora", "--max-loras-per-batch", str(plan.adapters)]
    if w.role != "both":
        out += ["--disaggregation-mode", w.role, "--disaggregation-transfer-backend", "nixl"]
    return out


def environment(plan: ServingPlan, w: Workers) -> tuple[str, ...]:
    """Return the environment variables for a worker's limits: DeepEP's kernels for decoding take 128 tokens a rank by
    default."""
    if not w.large_ep or w.role == "prefill":
        return ()
    tokens = -(-w.slots // w.attention_dp) * (1 + plan.draft_tokens)
    return (f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={tokens}",)


def launch(plan: ServingPlan) -> parts.Launch:
    """Return the commands that serve a plan with SGLang. Raises InputError for what it cannot do."""
    where, note = weights_of(plan)
    commands = []
    for place in parts.places(plan):
        words = ["--model-path", where, *options(plan, place), "--port", str(place.port)]
        if place.workers.role == "prefill":
            words += ["--disaggregation-bootstrap-port", str(place.port + 1000)]
        if place.nodes > 1:
            words += ["--nnodes", str(place.nodes), "--node-rank", "$NODE_RANK", "--dist-init-addr", "$HEAD:5000"]
        program = ("python3", "-m", "sglang.launch_server")
        variables = environment(plan, place.workers)
        commands.append(
            parts.Command(place.name, program, tuple(words), place.gpus, place.node, variables, ("sglang",))
        )
    notes = [parts.caching_note(plan), *([note] if note else [])]
    if len(commands) > 1:
        notes.append("sglang_router (a package of its own) routes to several workers, and from prefill to decode")
    return parts.Launch("sglang", published("sglang").version, tuple(commands), {}, tuple(notes))
