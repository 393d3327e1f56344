"""Memory-bound operations in one pass over memory each: SwiGLU, rotary embedding, AdamW. Triton on CUDA, else torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings no Triton
    triton = None


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate | up] in its last dim: [..., 2 f] -> [..., f], computed in float32."""
    if x.is_cuda and triton is not None:
        return _SwiGLU.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves paired: x [t, heads, d]; cos, sin [t, d / 2] float32. Returns x's dtype."""
    if x.is_cuda and triton is not None:
        return _Rotate.apply(x, cos, sin)
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(x.dtype)


def fused_adamw(
    main: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor | None, scale: float,
    lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, step: int,
) -> None:  # fmt: skip
    """One AdamW step of a flat shard in one pass: reads main, grad and both moments once, writes what changed once.

    Args:
        main, grad, exp_avg, exp_avg_sq: float32 [n] on CUDA; all but ``grad`` are updated in place.
        out: the model's own weights [n] in its dtype, written too; None where ``main`` is the model's weight.
        scale: factor of the gradient (clipping).
        step: 1 at the first step.
    Source: arXiv:1711.05101, algorithm 2, as torch.optim.AdamW orders it.
    """
    n, block = main.numel(), 2048
    _adamw_kernel[(triton.cdiv(n, block),)](
        main, grad, exp_avg, exp_avg_sq, main if out is None else out, n, scale, lr / (1 - beta1**step),
        1 - lr * weight_decay, beta1, beta2, eps, (1 - beta2**step) ** 0.5, HAS_OUT=out is not None, BLOCK=block,
    )  # fmt: skip


def fused_step(adamw: torch.optim.AdamW, casts: Mapping[int, Tensor], scale: float, step: int) -> None:
    """`fused_adamw` of every parameter of ``adamw``, whose states exist and whose gradients are there.

    Args: casts: id of a main weight -> the model's own weight; none where they are the same. scale, step: as there.
    """
    for group in adamw.param_groups:
        beta1, beta2 = group["betas"]
        for main in group["params"]:
            if main.numel():  # a rank may hold no row of a small parameter
                s = adamw.state[main]
                tensors = (main, main.grad, s["exp_avg"], s["exp_avg_sq"], casts.get(id(main)))
                fused_adamw(*tensors, scale, group["lr"], group["weight_decay"], beta1, beta2, group["eps"], step)


if triton is not None:

    @triton.jit
    def _adamw_kernel(  # type: ignore[no-untyped-def]
        p_ptr, g_ptr, m_ptr, v_ptr, out_ptr, n, scale, step_size, decay, beta1, beta2, eps, correction,
        HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        keep = i < n
        g = tl.load(g_ptr + i, keep, 0.0) * scale
        m = tl.load(m_ptr + i, keep, 0.0)
        v = tl.load(v_ptr + i, keep, 0.0)
        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        p = tl.load(p_ptr + i, keep, 0.0) * decay - step_size * m / (tl.sqrt_rn(v) / correction + eps)
        tl.store(p_ptr + i, p, keep)
        tl.store(m_ptr + i, m, keep)
        tl.store(v_ptr + i, v, keep)
        if HAS_OUT:
            tl.store(out_ptr + i, p.to(out_ptr.dtype.element_ty), keep)

    @triton.jit
    def _swiglu_forward(x_ptr, y_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        keep = cols < width
        gate = tl.load(x_ptr + row * 2 * width + cols, keep, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + cols, keep, 0.0).to(tl.float32)
        tl.store(y_ptr + row * width + cols, gate * tl.sigmoid(gate) * up, keep)

    @triton.jit
    def _swiglu_backward(x_ptr, dy_ptr, dx_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        keep = cols < width
        gate = tl.load(x_ptr + row * 2 * width + cols, keep, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + cols, keep, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * width + cols, keep, 0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        tl.store(dx_ptr + row * 2 * width + cols, dy * up * s * (1.0 + gate * (1.0 - s)), keep)
        tl.store(dx_ptr + row * 2 * width + width + cols, dy * gate * s, keep)

    @triton.jit
    def _rotate_kernel(  # type: ignore[no-untyped-def]
        x_ptr, y_ptr, cos_ptr, sin_ptr, heads, row_stride, head_stride, half, sign,
        HEADS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
        keep = (h < heads) & (d < half)
        c = tl.load(cos_ptr + t * half + d, d < half, 0.0)
        s = tl.load(sin_ptr + t * half + d, d < half, 0.0) * sign
        source = x_ptr + t * row_stride + h * head_stride + d
        a, b = tl.load(source, keep, 0.0).to(tl.float32), tl.load(source + half, keep, 0.0).to(tl.float32)
        target = y_ptr + (t * heads + h) * 2 * half + d
        tl.store(target, a * c - b * s, keep)
        tl.store(target + half, b * c + a * s, keep)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], width)
        block = 1024
        _swiglu_forward[(x.numel() // (2 * width), triton.cdiv(width, block))](x, y, width, BLOCK=block)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        dy, dx, width, block = grads[0].contiguous(), torch.empty_like(x), x.shape[-1] // 2, 1024
        _swiglu_backward[(x.numel() // (2 * width), triton.cdiv(width, block))](x, dy, dx, width, BLOCK=block)
        return dx


class _Rotate(torch.autograd.Function):
    """A rotation: its gradient is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch_rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _launch_rotate(grads[0], cos, sin, -1.0), None, None


def _launch_rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    t, heads, d = x.shape
    y = x.new_empty(t, heads, d)
    _rotate_kernel[(t,)](
        x, y, cos, sin, heads, x.stride(0), x.stride(1), d // 2, sign,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(d // 2),
    )  # fmt: skip
    return y
