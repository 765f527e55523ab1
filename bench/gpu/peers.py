"""Peers of the kernels over rows, on the same ids: torch's EmbeddingBag, and FBGEMM's table-batched embeddings."""

import importlib

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .rig import Action, Rig


class _Peer:
    """``forward(number)`` looks a batch up; ``backward`` follows it, with an update."""

    def __init__(self) -> None:
        self._out: Tensor | None = None

    def forward(self, number: int) -> Tensor:
        """float32 [B, tables * D]."""
        raise NotImplementedError

    def backward(self, number: int) -> None:
        raise NotImplementedError

    def _backward(self, gradient: Tensor) -> None:
        out, self._out = self._out, None
        assert out is not None
        out.backward(gradient)  # type: ignore[no-untyped-call]

    @property
    def actions(self) -> dict[str, Action]:
        return {"forward": self.forward, "backward": self.backward}


class TorchPeer(_Peer):
    """One ``embedding_bag`` call over the rows of all tables; backward gives a sparse gradient, torch's SGD applies it.

    Args:
        weights: float32 [S, D], which it trains.
        rows: of each batch, int32 [N].
        starts: int32 [K + 1], of every batch, feature-major.
        gradient: float32 [B, tables * D], of every batch.
    """

    def __init__(self, weights: Tensor, rows: list[Tensor], starts: Tensor, gradient: Tensor) -> None:
        super().__init__()
        self._leaf = weights.detach().requires_grad_()
        # Torch's sparse gradients have ids of 64 bits.
        self._rows, self._starts = [own.long() for own in rows], starts.long()
        samples, dim = len(gradient), weights.shape[1]
        self._gradient = gradient.view(samples, -1, dim).transpose(0, 1).reshape(-1, dim)
        self._samples = samples
        self._optimizer = torch.optim.SGD([self._leaf], lr=1e-6)

    def forward(self, number: int) -> Tensor:
        out = embedding_bag(
            self._rows[number], self._leaf, self._starts, mode="sum", sparse=True, include_last_offset=True
        )
        self._out = out
        return out.view(-1, self._samples, out.shape[1]).transpose(0, 1).flatten(1)

    def backward(self, number: int) -> None:
        del number
        self._backward(self._gradient)
        self._optimizer.step()
        self._leaf.grad = None


def fbgemm_missing(rig: Rig) -> str:
    """Why FBGEMM cannot be measured on this device, or "": found out by a small lookup."""
    if not rig.is_cuda:
        return "there is no CUDA device"
    rows, starts = (torch.arange(count, dtype=torch.int32, device=rig.device) for count in (4, 5))
    gradient = torch.ones((2, 16), device=rig.device)
    # Whatever is wrong with it, the rest is measured.
    try:
        for optimizer in ("sgd", "rowwise_adagrad"):
            peer = FbgemmPeer(rig, 2, 2, 8, optimizer, [rows], starts, gradient)
            if peer.forward(0).shape != (2, 16):
                return "its result has another shape than expected"
            peer.backward(0)
        rig.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


class FbgemmPeer(_Peer):
    """``SplitTableBatchedEmbeddingBagsCodegen``, all rows in device memory, optimizer fused.

    Args:
        optimizer: "sgd" or "rowwise_adagrad".
        slots: of each batch: int32 [N], feature-major; those of a table begin at its number times ``rows``.
        starts: int32 [K + 1], of every batch; gradient: float32 [B, tables * D], of every batch.
    """

    def __init__(
        self, rig: Rig, tables: int, rows: int, dim: int, optimizer: str, slots: list[Tensor], starts: Tensor,
        gradient: Tensor,
    ) -> None:  # fmt: skip
        super().__init__()
        common, training = (
            importlib.import_module(f"fbgemm_gpu.split_table_batched_embeddings_ops_{name}")
            for name in ("common", "training")
        )
        spec = (rows, dim, common.EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA)
        self._module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * tables,
            optimizer={
                "sgd": training.OptimType.EXACT_SGD,
                "rowwise_adagrad": training.OptimType.EXACT_ROWWISE_ADAGRAD,
            }[optimizer],
            learning_rate=1e-6,
            eps=1e-8,
            pooling_mode=common.PoolingMode.SUM,
            bounds_check_mode=common.BoundsCheckMode.NONE,
            device=rig.device,
        )
        self._module.init_embedding_weights_uniform(-1.0, 1.0)
        self._ids = [own.long() % rows for own in slots]
        self._starts, self._gradient = starts.long(), gradient

    def forward(self, number: int) -> Tensor:
        out: Tensor = self._module(self._ids[number], self._starts)
        self._out = out
        return out

    def backward(self, number: int) -> None:
        del number
        self._backward(self._gradient)
