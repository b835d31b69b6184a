"""Python objects between the ranks of a run, signed with the run's secret.

An object travels as a pickle, and loading a foreign pickle runs its code. So every message carries an HMAC-SHA256
under a secret that only the run's ranks have, and is verified before it is loaded. A local launcher draws a new
secret for each run; of ranks that torchrun or srun starts, PHALANX_SECRET holds it. Without a secret the signature is
only a checksum, and the network between the hosts must be trusted.

    message    32 bytes HMAC-SHA256(secret, pickle), then the pickle
"""

import hmac
import os
import pickle  # noqa: TID251 only what this run has signed is loaded
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.runtime.process.agent import SECRET_VARIABLE

_DIGEST_BYTES = 32


class ForgedMessageError(RuntimeError):
    """A message was not signed with the secret of this run."""


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather a picklable object from every rank of a group, in order. Collective. Raises ForgedMessageError."""
    message = _signed(mine)
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(message)] = message
    messages = list(torch.empty(ranks, longest, dtype=torch.uint8))
    dist.all_gather(messages, padded, group=group)
    return [_verified(m[: int(length)]) for m, length in zip(messages, lengths, strict=True)]


def broadcast_object(mine: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the object of global rank 0 on every rank of a group. Collective. Raises ForgedMessageError."""
    first = dist.get_rank() == 0
    message = _signed(mine) if first else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)])
    dist.broadcast(length, src=0, group=group)
    received = message if first else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(received, src=0, group=group)
    return mine if first else _verified(received)


def _signed(value: Any) -> Tensor:
    """Return the message (bytes,) that carries a value."""
    content = pickle.dumps(value)
    return torch.frombuffer(bytearray(_digest(content) + content), dtype=torch.uint8)


def _verified(message: Tensor) -> Any:
    """Return the value that a message (bytes,) carries, if its signature is right."""
    data = message.numpy().tobytes()
    content = data[_DIGEST_BYTES:]
    if not hmac.compare_digest(data[:_DIGEST_BYTES], _digest(content)):
        raise ForgedMessageError(
            f"a message of {len(data)} bytes between ranks was not signed with this run's secret; "
            f"do all ranks have the same {SECRET_VARIABLE}?"
        )
    return pickle.loads(content)  # noqa: S301 its signature was right


def _digest(content: bytes) -> bytes:
    return hmac.digest(os.environ.get(SECRET_VARIABLE, "").encode(), content, "sha256")
