"""TensorRT-LLM: `trtllm-serve` for each worker, a file of further options, and a router for separate prefill."""

from typing import Any

from phalanx.frameworks.writing.yaml import stream
from phalanx.serving.launch import parts
from phalanx.serving.launch.arguments import published
from phalanx.serving.launch.checkpoints import weights_of
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError


def require_possible(place: parts.WorkerPlace) -> None:
    """Require attention data parallelism over all ranks, as in enable_attention_dp. Raises InputError."""
    w = place.workers
    if w.attention_dp > 1 and w.tp > 1:
        reason = f"TensorRT-LLM attends apart on every rank, not on groups of tp = {w.tp}"
        raise InputError("workers.attention_dp", w.attention_dp, reason, "use tp = 1, or --engine sglang")


def engine_file(plan: ServingPlan, place: parts.WorkerPlace) -> str:
    """Return the options without a command-line argument, as YAML (LlmArgs' names)."""
    w = place.workers
    settings: dict[str, Any] = {
        "enable_attention_dp": w.attention_dp > 1,
        "kv_cache_config": {"dtype": "fp8" if plan.cache == "fp8" else "auto", "tokens_per_block": plan.page_tokens},
    }
    if w.role != "prefill":
        settings["cuda_graph_config"] = {"max_batch_size": w.slots, "enable_padding": True}
    if plan.draft_tokens:
        kind = "MTP" if parts.predicts_tokens(plan) else "NGram"
        length = "num_nextn_predict_layers" if kind == "MTP" else "max_draft_len"
        settings["speculative_config"] = {"decoding_type": kind, length: plan.draft_tokens}
    if w.large_ep:
        slots = (plan.model.experts.count if plan.model.experts else 0) + parts.REDUNDANT_EXPERTS
        balancer = {"num_slots": slots, "layer_updates_per_iter": 1}
        settings["moe_config"] = {"backend": "WIDEEP", "load_balancer": balancer}
    if plan.adapters:
        settings["lora_config"] = {"max_loras": plan.adapters}
    if w.role != "both":
        settings["cache_transceiver_config"] = {"backend": "NIXL"}
    if w.role == "prefill":
        settings["disable_overlap_scheduler"] = True
    return stream([settings])


def options(plan: ServingPlan, place: parts.WorkerPlace) -> list[str]:
    """Return the options of `trtllm-serve` for one worker. Raises InputError for what it cannot do."""
    require_possible(place)
    w = place.workers
    out = ["--backend", "pytorch", "--tp_size", str(w.tp * w.attention_dp)]
    if w.pp > 1:
        out += ["--pp_size", str(w.pp)]
    if w.moe_ep > 1:
        out += ["--ep_size", str(w.moe_ep)]
    # The limit is that of one rank where attention is data parallel.
    if most := parts.most_requests(w, w.attention_dp):
        out += ["--max_batch_size", str(most)]
    out += ["--max_num_tokens", str(w.step_tokens)]
    if tokens := parts.context(plan, w):
        out += ["--max_seq_len", str(tokens)]
    return [*out, "--enable_chunked_prefill"]


def launch(plan: ServingPlan) -> parts.Launch:
    """Return the commands that serve a plan with TensorRT-LLM. Raises InputError for what it cannot do."""
    where, note = weights_of(plan)
    commands, files = [], {}
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    for place in parts.places(plan):
        name = f"{place.workers.role}.yaml"
        files[name] = engine_file(plan, place)
        words = [*options(plan, place), "--config", name, "--port", str(place.port)]
        if place.workers.role != "both":
            urls[place.workers.role].append(f"node{place.node}:{place.port}")
        program: tuple[str, ...] = ("trtllm-serve", where)
        if place.nodes > 1:
            program = ("mpirun", "-n", str(place.workers.gpus), "trtllm-llmapi-launch", *program)
        commands.append(parts.Command(place.name, program, tuple(words), place.gpus, place.node, (), ("trtllm",)))
    notes = [parts.caching_note(plan), *([note] if note else [])]
    if plan.weights == "fp8":
        notes.append("fp8 needs a checkpoint that was quantised so, such as nvidia's -FP8 releases")
    if len(plan.workers) > 1:
        settings: dict[str, Any] = {"hostname": "0.0.0.0", "port": 9000, "backend": "pytorch"}  # noqa: S104  a router's
        for key, role in (("context_servers", "prefill"), ("generation_servers", "decode")):
            settings[key] = {"num_instances": len(urls[role]), "urls": urls[role]}
        files["disaggregated.yaml"] = stream([settings])
        router = parts.Command("router", ("trtllm-serve", "disaggregated", "-c", "disaggregated.yaml"), ())
        commands.append(router)
        notes.append(
            "the router of disaggregated.yaml listens on every interface of its node, without authentication"
        )
    elif len(commands) > 1:
        notes.append("several workers: put any HTTP load balancer that counts requests under way before them")
    return parts.Launch("trtllm", published("trtllm").version, tuple(commands), files, tuple(notes))
