"""Run somebody's model under the settings the mathematics needs, and give it back exactly as found."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode under kernels that have second-order and forward-mode rules.

    - Fused attention has neither rule, so the math kernel is selected; `nn.MultiheadAttention` and
      `nn.TransformerEncoder` take a fused path of their own in eval mode, which is switched off.
    - oneDNN's and cuDNN's fused recurrent kernels have no forward-mode and no double-backward rule. They are
      switched off only around models that hold a recurrent layer, since convolutions need them for speed.
    - `sparse=True` embeddings would return sparse gradients, which no flat vector can take.
    - The global random state is put back, whatever a data loader or a stray dropout drew from it.
    """
    with ExitStack() as stack:
        stack.enter_context(_eval_mode(model))
        stack.enter_context(_dense_embeddings(model))
        stack.enter_context(_no_fused_encoder())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model)))
        if any(isinstance(module, _RECURRENT) for module in model.modules()):
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        # torch.func differentiates inside an outer no_grad; what it spares is the ordinary graph that parameters
        # outside the selection would record.
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # One by one: `model.train()` would overwrite submodules that the caller froze in eval mode.
        for module, mode in modes:
            module.training = mode


@contextmanager
def _dense_embeddings(model: nn.Module) -> Iterator[None]:
    sparse = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    for module in sparse:
        module.sparse = False
    try:
        yield
    finally:
        for module in sparse:
            module.sparse = True


@contextmanager
def _no_fused_encoder() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
