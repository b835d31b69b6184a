"""Text from a checkpoint: temperature and top-k sampling with a key-value cache.

Tensor-parallel ranks each have a part of every layer, and gather the logits of the last token: all draw the same next
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.nn import vocab_parallel
from phalanx.nn.attention import Cache
from phalanx.nn.decoder import Decoder
from phalanx.nn.init import create, fill_buffers, initial, of_rank
from phalanx.nn.weight_files import of_run, widest
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.model.spec import parameters
from phalanx.spec.strategy.split import Split, require_split
from phalanx.train.data.tokenizer import open_tokenizer


@dataclass(frozen=True)
class Sampling:
    """How text is sampled: number of `tokens`, `temperature` (0: greedy), `top_k` (0: all tokens), `seed`."""

    tokens: int = 80
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError("--tokens", self.tokens, "must be at least 1")
        if self.top_k < 0:
            raise InputError("--top-k", self.top_k, "must not be negative", "0 draws from all tokens")
        if not (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3):
            raise InputError("--temperature", self.temperature, "must be 0 (greedy) or between 0.001 and 1000")
        if not 0 <= self.seed < 2**63:
            raise InputError("--seed", self.seed, "must be between 0 and 2^63 - 1")


@torch.no_grad()
def sample(model: Decoder, prompt: list[int], how: Sampling) -> list[int]:
    """Sample token ids that continue `prompt`. Beyond max_seq tokens, the context restarts with the newer half."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(how.seed)
    ids = list(prompt)
    cache, new = Cache(), ids
    for _ in range(how.tokens):
        if cache.length + len(new) > model.spec.max_seq:
            # Positions are absolute: start over with the newer half.
            cache, new = Cache(), ids[-(model.spec.max_seq // 2) :]
        logits = model(torch.tensor([new], device=device), cache=cache)[0, -1]
        if model.tp is not None:
            logits = vocab_parallel.gathered(model.tp, logits)
        logits = logits.float()  # (vocab,)
        if how.temperature == 0:
            chosen = int(logits.argmax())
        else:
            logits = logits / how.temperature
            if 0 < how.top_k < len(logits):
                logits[logits < logits.topk(how.top_k).values[-1]] = float("-inf")
            chosen = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        ids.append(chosen)
        new = [chosen]
    return ids[len(prompt) :]


@torch.no_grad()
def generate(folder: Path, prompt: str, how: Sampling, comm: Comm | None = None) -> str:
    """Continue a prompt with the newest checkpoint of a run, in the type of its weights; alone, or all ranks of a
    tensor-parallel world together. Raises InputError, CheckpointError."""
    spec = plans.model_of(folder)
    split = Split(spec) if comm is None else Split(spec, comm.world.size, comm.world.rank)
    require_split(spec, split)
    if not (folder / "tokenizer.json").exists():
        raise InputError(
            "run", str(folder), "holds no tokenizer.json: it was trained on token ids", "copy the tokenizer's there"
        )
    tokenizer = open_tokenizer(folder / "tokenizer.json", spec.vocab, "run")
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise InputError("--prompt", prompt, "is empty", "give it at least one character")
    if len(ids) > spec.max_seq:
        raise InputError("--prompt", prompt, f"is {len(ids)} tokens, max_seq is {spec.max_seq}", "shorten it")
    weights = of_run(folder, spec)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if comm is None else comm.world.device
    inner = None if comm is None else LayerComm(comm)
    tp = None if inner is None or split.tp == 1 else TensorParallel(inner, split)
    model = create(split.local, widest(weights, spec), device, tp=tp, tokens=SequenceTokens(inner, tp))
    own, first = dict(model.named_parameters()), of_rank(initial(spec, 0, weights), split)
    for p in parameters(split.local):
        own[p.fqn].copy_(first(p, 0, p.numel).view(p.shape))
    fill_buffers(model, weights)
    text = tokenizer.decode(ids + sample(model, ids, how))
    return prompt + text[len(tokenizer.decode(ids)) :]  # decoded alone, the continuation would lose its leading space
