"""Small models of the kinds that public zoos have, over ``nn.Embedding`` and ``nn.EmbeddingBag``.

Each is built of ids below ``ROWS`` and gives one number a sample; ``batch`` gives what its ``forward`` takes.
"""

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

ROWS: Final = 50
DIM: Final = 8
FIELDS: Final = 3
LENGTH: Final = 6
BATCH: Final = 12


def mlp(*widths: int) -> nn.Sequential:
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """Bags of several ids, all pairs of dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {f"f{n}": nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True) for n in range(FIELDS)}
        )
        self.bottom, self.top = mlp(2, 16, DIM), mlp(DIM + FIELDS * (FIELDS + 1) // 2, 16, 1)

    def forward(self, ids: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = torch.stack([bottom, *(bag((ids + n) % ROWS, offsets) for n, bag in enumerate(self.bags.values()))], 1)
        first, second = torch.tril_indices(FIELDS + 1, FIELDS + 1, offset=-1)
        return self.top(torch.cat([bottom, (rows @ rows.mT)[:, first, second]], dim=1)).squeeze(1)


class TwoTowers(nn.Module):
    """A history pooled by mean on one side, an item on the other; both of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.history = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.history.weight = self.item.weight
        self.left, self.right = mlp(DIM, 16, DIM), mlp(DIM, 16, DIM)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(self.left(self.history(history)), self.right(self.item(items)))


class Recurrent(nn.Module):
    """GRU4Rec over a padded sequence, scoring all items with the tied table, and sampling those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.place = nn.Embedding(LENGTH, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        state = self.gru(self.item(history) + self.place(torch.arange(LENGTH)))[1][0]
        scores = (state @ self.item(torch.arange(ROWS)).T).log_softmax(1)
        return scores.gather(1, items[:, None]).squeeze(1)


class MaxPooling(nn.Module):
    """Session features pooled by their maximum, beside weighted sums."""

    def __init__(self) -> None:
        super().__init__()
        self.most = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.weighted = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.weight, self.head = nn.Linear(1, 1), mlp(2 * DIM, 16, 1)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        weights = self.weight((history % 7).float()[..., None]).squeeze(2)
        pooled = torch.cat([self.most(history), self.weighted(history, per_sample_weights=weights)], dim=1)
        return self.head(pooled).squeeze(1) + items / ROWS


class SharedModule(nn.Module):
    """One embedding module under two names, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(ROWS, DIM))
        self.decoder = nn.ModuleList([self.encoder[0], mlp(DIM, 16, 1)])
        self.frozen = nn.Embedding(ROWS, DIM).requires_grad_(False)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        mixed = self.encoder(users) + self.decoder[0](items) * self.frozen(users)
        score: Tensor = self.decoder[1](mixed).squeeze(1)
        return score


def bags(random: torch.Generator) -> tuple[Tensor, ...]:
    offsets = torch.randint(3, (BATCH + 1,), generator=random).cumsum(0)
    offsets = offsets - offsets[0]
    ids = torch.randint(ROWS, (int(offsets[-1]),), generator=random)
    return ids, offsets, torch.rand(BATCH, 2, generator=random)


def pairs(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(ROWS, (BATCH,), generator=random), torch.randint(ROWS, (BATCH,), generator=random)


def histories(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(ROWS, (BATCH, LENGTH), generator=random), torch.randint(ROWS, (BATCH,), generator=random)


MODELS: Final[dict[type[nn.Module], Callable[[torch.Generator], tuple[Any, ...]]]] = {
    Dlrm: bags,
    TwoTowers: histories,
    Recurrent: histories,
    MaxPooling: histories,
    SharedModule: pairs,
}
"""What each model's batches are made by."""
