"""The native CPU kernels in place of torch's matrix products, in a model that is otherwise run by torch.

Torch's products add in an order that depends on the shape. The kernels' do not, so a value has the same bits whatever
the chunk cut, the rest of the batch or the number of ranks over which the columns are cut.

Shape suffixes: T rows, N heads, I inputs, O outputs.
"""

import copy
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from pdserve._kernels import CpuKernels, PackedMatrix
from pdserve.model.decoder import LayerStack
from pdserve.model.products import GatedLinear, HeadLinear, Linear

Stack = TypeVar("Stack", bound=LayerStack)

_MIN_SHARED_WORK = 1 << 18
"""Multiplications from which a product is shared out: about 10 us of work, what waking the other threads costs."""


class Kernels:
    """Of one thread for small products, as those of experts are, and of all threads for large ones."""

    def __init__(self, *, num_threads: int) -> None:
        self._alone, self._shared = CpuKernels(1), CpuKernels(num_threads)

    def for_work(self, num_multiplications: int) -> CpuKernels:
        return self._alone if num_multiplications < _MIN_SHARED_WORK else self._shared


class KernelProduct(nn.Module):
    """Lifetime: owns a packed copy of the weight."""

    def __init__(self, kernels: Kernels, packed: PackedMatrix, *, out_dim: int) -> None:
        super().__init__()
        self._kernels, self._packed, self._out_dim = kernels, packed, out_dim

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        out_TO = torch.empty(len(x_TI), self._out_dim)
        if len(x_TI) > 0:
            kernels = self._kernels.for_work(x_TI.numel() * self._out_dim)
            kernels.linear(x_TI.contiguous().numpy(), self._packed, out_TO.numpy())
        return out_TO


class KernelHeadProducts(nn.Module):
    def __init__(self, products: list[KernelProduct]) -> None:
        super().__init__()
        self._products = products

    def forward(self, x_TNI: torch.Tensor) -> torch.Tensor:
        return torch.stack([product(x_TNI[:, n]) for n, product in enumerate(self._products)], dim=1)


def fit_kernels(stack: LayerStack) -> bool:
    weight = stack.embedding.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def with_kernels(stack: Stack, *, num_threads: int) -> Stack:
    """A model or head that shares all with the given one but its products' weights, of which it has packed copies.

    Requires: `fit_kernels(stack)`.
    """
    kernels = Kernels(num_threads=num_threads)
    shared = (stack.communicator, *stack.parameters(), *stack.buffers())
    packed_stack = copy.deepcopy(stack, {id(part): part for part in shared})
    for owner in list(packed_stack.modules()):
        for name, product in list(owner.named_children()):
            replacement = _replacement(kernels, product)
            if replacement is not None:
                setattr(owner, name, replacement)
    return packed_stack


def _replacement(kernels: Kernels, product: nn.Module) -> nn.Module | None:
    """None for what is no product, or has no outputs on this rank."""
    if isinstance(product, Linear) and len(product.weight) > 0:
        bias = None if product.bias is None else _array(product.bias)
        packed = PackedMatrix.plain(_array(product.weight), bias)
        return KernelProduct(kernels, packed, out_dim=len(product.weight))
    if isinstance(product, GatedLinear) and len(product.weight) > 0:
        gate_OI, up_OI = product.weight.chunk(2)
        return KernelProduct(kernels, PackedMatrix.swiglu(_array(gate_OI), _array(up_OI)), out_dim=len(gate_OI))
    if isinstance(product, HeadLinear):
        return KernelHeadProducts(
            [
                KernelProduct(kernels, PackedMatrix.plain(_array(weight_OI)), out_dim=len(weight_OI))
                for weight_OI in product.weight
            ]
        )
    return None


def _array(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return tensor.detach().contiguous().numpy()
