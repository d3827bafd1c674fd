"""Row-wise ops of a decoder layer: norms, activations, and activation(gate) * up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_tanh_gelu = partial(F.gelu, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}
"""Activations by their names in Hugging Face configurations (transformers' ACT2FN). A
model with another is refused."""


def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor
) -> Tensor:
    """xIELU of x (arXiv 2411.13010), whose numbers [1] are float32: alpha of positive
    and of negative x, beta, and the bound of x before exp."""
    wide = x.float()
    positive = alpha_p * wide.square()
    negative = alpha_n * (torch.expm1(wide.minimum(eps)) - wide)
    return (torch.where(wide > 0, positive, negative) + beta * wide).to(x.dtype)


class Rows:
    """The definition, in plain torch and float32. The exporter traces it.

    A backend may pass a subclass with faster ops, which must compute the same.
    """

    def norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """x [..., columns]: an RMS norm, or a layer norm where there is a ``bias``."""
        if bias is None:
            return self.rms_norm(x, weight, eps)
        return self.layer_norm(x, weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""
        wide = x.float()
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def unit_norm(self, x: Tensor, eps: float) -> Tensor:
        """An RMS norm without weights."""
        wide = x.float()
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias (arXiv 1607.06450)."""
        wide_weight, wide_bias = weight.float(), bias.float()
        wide = F.layer_norm(x.float(), weight.shape, wide_weight, wide_bias, eps)
        return wide.to(x.dtype)

    def gated(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        """activation(gate) * up, all [T, columns]. May overwrite its inputs."""
        return ACTIVATIONS[activation](gate) * up
