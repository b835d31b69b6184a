"""BatchNorm with statistics over all replicas' batches, on any device.

    mean = Σ_r n_r mean_r / N,  N var = Σ_r M2_r + Σ_r n_r (mean_r - mean)²       (Chan, Golub, LeVeque 1983)
    x̂    = (x - mean) / sqrt(var + eps)
    dx   = (g - (Σ g + x̂ Σ g x̂) / N) / sqrt(var + eps)                            (Ioffe and Szegedy 2015)

n_r elements of a channel on rank r, M2_r the sum of their squared distances from mean_r, Σ g over the elements of
all ranks. torch.nn.SyncBatchNorm does the same on GPUs alone. Forward gathers 2 C + 1 numbers of each rank, backward
all-reduces 2 C, for C channels. Weight and bias are applied outside, so that their gradients are a rank's own, which
the data-parallel engine reduces."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.runtime.comm.communicator import Comm


def synchronise_batch_norms(module: nn.Module, comm: Comm) -> None:
    """Make every BatchNorm of a module compute its statistics over all data-parallel ranks; names and state stay."""
    axis = comm.mesh.name("dp_replicate", "dp_shard")
    if comm.size(axis) == 1:
        return
    for name, norm in module.named_modules():
        if isinstance(norm, _BatchNorm):
            norm.forward = partial(_forward, norm, comm, axis, name)  # type: ignore[method-assign]


def _forward(norm: Any, comm: Comm, axis: str, unit: str, x: Tensor) -> Tensor:
    """Normalise x (batch, channels, ...), in evaluation by the running statistics if the layer has them."""
    norm._check_input_dim(x)
    if not norm.training and norm.running_mean is not None:
        return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    y, mean, var, count = _Normalise.apply(x, comm, axis, unit, norm.eps)
    if norm.training and norm.running_mean is not None:
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            # momentum=None means the mean of all batches so far.
            new = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), new)
            norm.running_var.lerp_((var * count / (count - 1)).to(norm.running_var.dtype), new)
    if norm.affine:
        shape = (1, -1, *(1,) * (x.dim() - 2))
        y = y * norm.weight.view(shape) + norm.bias.view(shape)
    return y  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str, unit: str, eps: float) -> tuple[Tensor, ...]:
        """Return (x̂, mean (channels,), var (channels,), N ()), in fp32 at least but x̂."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        dims = [d for d in range(x.dim()) if d != 1]
        n = x.numel() // x.shape[1]
        if n == 0:
            raise ValueError(f"{unit}: BatchNorm over ranks got a batch without elements, of shape {tuple(x.shape)}")
        own_mean = wide.mean(dims)
        own_m2 = (wide - _channels(own_mean, x)).square().sum(dims)
        own = torch.cat([own_mean, own_m2, wide.new_full((1,), n)])
        of_ranks = wide.new_empty(comm.size(axis) * own.numel())
        comm.all_gather(of_ranks, own, axis, unit=unit, phase="F").wait()
        table = of_ranks.view(-1, own.numel())  # (ranks, 2 channels + 1)
        means, m2s, counts = table[:, : x.shape[1]], table[:, x.shape[1] : -1], table[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        var = (m2s.sum(0) + (counts * (means - mean).square()).sum(0)) / count
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, mean, scale, count)
        ctx.comm, ctx.axis, ctx.unit = comm, axis, unit
        ctx.mark_non_differentiable(mean, var, count)
        return ((wide - _channels(mean, x)) * _channels(scale, x)).to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, scale, count = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        wide = g.to(mean.dtype)
        x_hat = (x.to(mean.dtype) - _channels(mean, x)) * _channels(scale, x)
        sums = torch.cat([wide.sum(dims), (wide * x_hat).sum(dims)])
        ctx.comm.all_reduce(sums, ctx.axis, unit=ctx.unit, phase="B").wait()
        of_g, of_product = (_channels(part, x) for part in (sums / count).chunk(2))
        return ((wide - of_g - x_hat * of_product) * _channels(scale, x)).to(g.dtype), None, None, None, None


def _channels(of_channel: Tensor, x: Tensor) -> Tensor:
    """View (channels,) so that it broadcasts over x (batch, channels, ...)."""
    return of_channel.view(1, -1, *(1,) * (x.dim() - 2))
