"""What a network costs, found on the meta device: nothing is allocated and nothing is computed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ADAMW_BYTES = 4 + 4 + 4 + 4  # weight, gradient and AdamW's two moments, each fp32


@dataclass(frozen=True)
class Cost:
    """parameters: their number. flops: of one forward pass over an image (a multiply-add counts as two).
    activation_bytes: what an image, or the part of it that is trained on, adds to the memory at the worst moment of a
    forward and a backward pass in fp32, without what a device's libraries need for themselves."""

    parameters: int
    flops: int
    activation_bytes: int

    def training_bytes(self, microbatch: int, averages: int = 1) -> int:
        """Memory of training: weights, gradients, AdamW's moments, ``averages`` EMAs, a micro-batch's activations."""
        return self.parameters * (ADAMW_BYTES + 4 * averages) + microbatch * self.activation_bytes


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory behind a tensor, also on the meta device, where every data pointer is 0."""
    return tensor.untyped_storage()._cdata


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, n: int, channels: int, size: int, groups: int, eps: float):
    return torch.empty_like(x), x.new_empty(n, groups), x.new_empty(n, groups)


def _group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *sizes_and_mask):
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


# On the meta device torch finds these results' shapes in Python, which took half of the time of everything.
_RESULTS = {
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
}


class _LiveBytes(TorchDispatchMode):
    """Follows every tensor that an operation makes until it is freed. ``peak``: the most bytes alive at a time."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.own = {storage_key(tensor) for p in model.parameters() for tensor in (p, p.grad)}
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # by storage: views of one activation count once
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = _RESULTS.get(func, func)(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive and key not in self.own:
            self.alive[key] = weakref.ref(storage, lambda _: self._free(key)), storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key)[1]


class _FusedAttention(torch.autograd.Function):
    """What a real device's kernels keep of attention for the backward pass: nothing of the size tokens × tokens."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """On the meta device torch takes attention apart. (Its mode for functions would be off in the backward pass, where
    activations are computed again.)"""
    plain = F.scaled_dot_product_attention

    def fused(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> Tensor:
        return _FusedAttention.apply(q, k, v) if q.is_meta else plain(q, k, v, *args, **kwargs)

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def count_flops(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> int:
    """FLOPs of ``call(model)``, a forward pass, for a model built on the meta device."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(model)
    return counter.get_total_flops()


def peak_bytes(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> int:
    """Most memory that ``call(model)`` and its backward pass take, for a model built on the meta device.

    Weights and gradients are left out; the latter lie there from the beginning, as from the second micro-batch on.
    """
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    live = _LiveBytes(model)
    with _fused_attention(), live:
        out = call(model)
        out.backward(torch.empty_like(out))
    return live.peak


def measure(model: nn.Module, call: Callable[[nn.Module], Tensor], trained: Callable[[nn.Module], Tensor] | None = None,
            images: int = 1) -> Cost:  # fmt: skip
    """Cost of ``call(model)``, a pass over ``images`` images, for a model built on the meta device.

    trained: the pass over those parts of the images which are trained on, where they are not the whole.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, count_flops(model, call) // images, peak_bytes(model, trained or call) // images)
