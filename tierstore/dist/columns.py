"""Row-wise Adagrad of rows whose columns are on several ranks: it needs the mean square of the whole gradient."""

import numpy as np
import torch
from torch import Tensor

from ..lookup.joined import Joined
from ..optim.kernels import mean_squares
from ..pool.bags import NO_ARG_MAX
from .owners import Owners


def with_mean_squares(asked: Joined, gradients: Tensor, num_parts: int, owners: Owners) -> Tensor:
    """What ``RowWiseAdagradOfColumns`` takes. Collective.

    The owners of a row's parts were asked for the same rows. Each adds the ranks' gradients up, sends its part of the
    sum to the others, and takes the mean square of the whole, as one process would have it.

    Args:
        asked: the rows that ranks asked this one for; see ``Joined.of_keys``.
        gradients: float32 [asked, columns of a part].

    Returns:
        float32 [1, asked * columns + asked]: the gradients, and behind them the mean square of each one's row.
    """
    count, width = gradients.shape
    inverse, keys = asked.distinct
    groups = asked.groups(NO_ARG_MAX, count * width, is_mean=False)
    merged = groups.merged(inverse, len(keys), width, gradients.numpy().reshape(1, -1))
    whole = np.empty((len(keys), num_parts, width), np.float32)
    owner = owners.of(keys, num_parts)
    by_key = np.argsort(keys)
    shared = [by_key[(owner[by_key] == rank).any(1)] for rank in range(owners.ranks.size)]
    counts = [len(rows) for rows in shared]
    sent = torch.from_numpy(merged[np.concatenate(shared)])
    taken = torch.split(owners.ranks.exchange(sent, counts, counts), counts)
    for rank, (rows, part) in enumerate(zip(shared, taken, strict=True)):
        whole[rows, (owner[rows] == rank).argmax(1)] = part.numpy()
    squares = np.empty(count, np.float32)
    squares[asked.bags.columns // width] = mean_squares(whole.reshape(len(keys), num_parts * width))[inverse]
    return torch.cat([gradients.reshape(-1), torch.from_numpy(squares)])[None]
