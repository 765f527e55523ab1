"""One step of training."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from .build import Run
from .readers import Batch

__all__ = ["train_step"]


def train_step(run: Run, batch: Batch) -> Tensor:
    """One step; rows are updated inside backward.

    Returns:
        the batch's mean loss, a scalar where the model is. On a GPU the step may still be under way.
    """
    loss = binary_cross_entropy_with_logits(run.model(batch.dense, batch.sparse), batch.labels)
    run.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    run.optimizer.step()
    return loss.detach()
