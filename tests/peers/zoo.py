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


class Fields(nn.Module):
    """Base of models of one categorical id a field and some dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS))

    def embedded(self, ids: Tensor) -> Tensor:
        return torch.stack([each(ids[:, field]) for field, each in enumerate(self.embeddings)], dim=1)


class WideAndDeep(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(FIELDS * ROWS, 1, mode="sum")
        self.deep = mlp(FIELDS * DIM + 2, 16, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        wide = self.wide(ids + ROWS * torch.arange(FIELDS))
        return (wide + self.deep(torch.cat([self.embedded(ids).flatten(1), dense], dim=1))).squeeze(1)


class DeepFM(WideAndDeep):
    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = self.embedded(ids)
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1) / 2
        return super().forward(ids, dense) + pairs


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


class CrossNetwork(Fields):
    """DCN-v2."""

    def __init__(self) -> None:
        super().__init__()
        width = FIELDS * DIM + 2
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        first = crossed = torch.cat([self.embedded(ids).flatten(1), dense], dim=1)
        for cross in self.crosses:
            crossed = first * cross(crossed) + crossed
        return self.head(crossed).squeeze(1)


class AutoInt(Fields):
    """Attention over fields."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.head = nn.Linear(FIELDS * DIM + 2, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = self.embedded(ids)
        mixed = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        return self.head(torch.cat([mixed.flatten(1), dense], dim=1)).squeeze(1)


class ProductNetwork(Fields):
    """PNN: inner products of fields, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.head = mlp(FIELDS * DIM + FIELDS * (FIELDS - 1) // 2 + 2, 16, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = self.embedded(ids)
        first, second = torch.tril_indices(FIELDS, FIELDS, offset=-1)
        products = (rows[:, first] * rows[:, second]).sum(-1)
        return self.head(torch.cat([rows.flatten(1), products, dense], dim=1)).squeeze(1)


class Factorization(nn.Module):
    """Users times items, with biases of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.user_bias, self.item_bias = nn.Embedding(ROWS, 1), nn.Embedding(ROWS, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        biases = self.user_bias(users) + self.item_bias(items)
        return (self.user(users) * self.item(items)).sum(1) + biases.squeeze(1)


class NeuralCollaborative(nn.Module):
    """NeuMF: a product and an MLP, each with embeddings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.ModuleDict({name: nn.Embedding(ROWS, DIM) for name in ("user", "item")})
        self.deep = nn.ModuleDict({name: nn.Embedding(ROWS, 2 * DIM) for name in ("user", "item")})
        self.mlp, self.head = mlp(4 * DIM, 16, DIM), nn.Linear(2 * DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        deep = self.mlp(torch.cat([self.deep["user"](users), self.deep["item"](items)], dim=1))
        product = self.product["user"](users) * self.product["item"](items)
        return self.head(torch.cat([product, deep], dim=1)).squeeze(1)


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


class Sequential(nn.Module):
    """Base of models over a padded sequence of items and one candidate from the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.place = nn.Embedding(LENGTH, DIM)

    def placed(self, history: Tensor) -> Tensor:
        return self.item(history) + self.place(torch.arange(LENGTH))


class SelfAttentive(Sequential):
    """SASRec: causal attention, the last state times the candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return (self.layer(self.placed(history), src_mask=mask, is_causal=True)[:, -1] * self.item(items)).sum(1)


class Recurrent(Sequential):
    """GRU4Rec, scoring all items with the tied table, and sampling those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        state = self.gru(self.placed(history))[1][0]
        scores = (state @ self.item(torch.arange(ROWS)).T).log_softmax(1)
        return scores.gather(1, items[:, None]).squeeze(1)


class InterestNetwork(Sequential):
    """DIN: a history weighted by its likeness to the candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.likeness, self.head = mlp(3 * DIM, 16, 1), mlp(2 * DIM, 16, 1)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        rows, item = self.placed(history), self.item(items)
        wide = item[:, None].expand_as(rows)
        weights = self.likeness(torch.cat([rows, wide, rows * wide], dim=2)) * (history != 0)[..., None]
        return self.head(torch.cat([(weights * rows).sum(1), item], dim=1)).squeeze(1)


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


def fields(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(ROWS, (BATCH, FIELDS), generator=random), torch.rand(BATCH, 2, generator=random)


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
    WideAndDeep: fields,
    DeepFM: fields,
    Dlrm: bags,
    CrossNetwork: fields,
    AutoInt: fields,
    ProductNetwork: fields,
    Factorization: pairs,
    NeuralCollaborative: pairs,
    TwoTowers: histories,
    SelfAttentive: histories,
    Recurrent: histories,
    InterestNetwork: histories,
    MaxPooling: histories,
    SharedModule: pairs,
}
"""What each model's batches are made by."""
