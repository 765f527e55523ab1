"""The next item on users' lists, in order of time: a small SASRec over un-pooled rows, and its twin on nn.Embedding."""

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import tierstore
from tierstore import JaggedTensor, KeyedJaggedTensor

ITEMS, USERS, DIM, LONGEST, NEGATIVES = 10_000, 200, 32, 16, 20
BATCH, STEPS, SAVE_EVERY = 128, 120, 40


class Batch(NamedTuple):
    """B samples, in order of time."""

    features: KeyedJaggedTensor  # "history": what a user saw last; "candidates": 1 + NEGATIVES, the true next one first
    times: JaggedTensor  # int64 seconds, one for each item of a history
    now: Tensor  # int64 [B]: when the next item is seen


def events(seed: int = 0) -> Iterator[tuple[int, int, int]]:
    """Time, user and item, without end, by ascending time. A user who saw item i sees i + 1 next, or starts again at a
    popular item."""
    draw, time, last = random.Random(seed), 0, {}
    while True:
        time, user = time + draw.randrange(60), draw.randrange(USERS)
        goes_on = user in last and draw.random() < 0.8
        last[user] = last[user] + 1 if goes_on else int((ITEMS // 2) * draw.random() ** 4)
        yield time, user, last[user]


def batches(first: int, stop: int) -> Iterator[Batch]:
    """Steps [first, stop); each sees only what was before."""
    seen: dict[int, list[tuple[int, int]]] = {}
    stream = events()
    for step in range(stop):
        lists, now, nexts = [], [], []
        while len(nexts) < BATCH:
            time, user, item = next(stream)
            before = seen.setdefault(user, [])
            if before:
                lists.append(list(before))
                now.append(time)
                nexts.append(item)
            before.append((time, item))
        if step >= first:
            yield batch_of(step, lists, now, nexts)


def batch_of(step: int, lists: list[list[tuple[int, int]]], now: list[int], nexts: list[int]) -> Batch:
    times, items = torch.tensor([each for pairs in lists for each in pairs]).T
    lengths = torch.tensor([len(pairs) for pairs in lists])
    history, times = (JaggedTensor(each, lengths=lengths).last(LONGEST) for each in (items, times))
    others = ITEMS // 2 * torch.rand(BATCH, NEGATIVES, generator=torch.Generator().manual_seed(step)) ** 4
    candidates = torch.cat([torch.tensor(nexts)[:, None], others.long()], dim=1)
    values = torch.cat([history.values(), candidates.flatten()])
    counts = torch.cat([history.lengths(), torch.full((BATCH,), 1 + NEGATIVES)])
    return Batch(KeyedJaggedTensor(["history", "candidates"], values, lengths=counts), times, torch.tensor(now))


class SASRec(nn.Module):
    """``items`` gives the rows of each feature's lists, un-pooled."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items
        self.position, self.gap = nn.Embedding(LONGEST, DIM), nn.Embedding(32, DIM)
        self.norm, self.query_key_value = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, batch: Batch) -> Tensor:
        """Scores of the candidates, [B, 1 + NEGATIVES]."""
        rows = self.items(batch.features)
        history, lengths = rows["history"], rows["history"].lengths()
        seconds = torch.repeat_interleave(batch.now, lengths) - batch.times.values()
        timed = history.values() + self.gap(torch.log2(1.0 + seconds).long())
        x = JaggedTensor(timed, lengths=lengths).to_padded_dense(LONGEST) + self.position.weight
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)  # padding comes last
        x = x + self.mlp(x)
        state = x[torch.arange(BATCH), lengths - 1]
        return torch.einsum("bd,bcd->bc", state, rows["candidates"].values().view(BATCH, -1, DIM))


class Plain(nn.Module):
    """``nn.Embedding``, called as ``TieredEmbeddingCollection`` is."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.item = nn.Embedding.from_pretrained(weight, freeze=False)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        rows = self.item(features.values())
        return KeyedJaggedTensor(features.keys(), rows, lengths=features.lengths()).to_dict()


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], given: Iterable[Batch]) -> Iterator[float]:
    """The loss of each step."""
    for batch in given:
        loss = functional.cross_entropy(model(batch), torch.zeros(BATCH, dtype=torch.int64))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def hit_rate(model: nn.Module, step: int) -> float:
    """How often the next item is scored first, in the ten steps that follow."""
    with torch.no_grad():
        return torch.cat([model(batch).argmax(1) == 0 for batch in batches(step, step + 10)]).float().mean().item()


with tierstore.open("sasrec-store", ddr="1536KiB") as store:  # of 2.6 MB of rows and state
    table = store.create_table(
        tierstore.TableConfig(
            name="item",
            num_embeddings=ITEMS,
            embedding_dim=DIM,
            feature_names=("history", "candidates"),
            init=tierstore.init.Normal(std=0.1),
            optimizer=tierstore.optim.Adagrad(lr=0.3),
        )
    )
    torch.manual_seed(0)
    model = SASRec(tierstore.TieredEmbeddingCollection(store))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)  # of all but the rows, which train in backward
    first = tierstore.checkpoint.load(store, model, [optimizer])["step"] if store.version else 0
    stop, before = first + STEPS, hit_rate(model, first)
    ahead = tierstore.prefetch(batches(first, stop), model, features=lambda batch: {"items": batch.features})
    losses = []
    for loss in train(model, [optimizer], ahead):
        losses.append(loss)
        if (first + len(losses)) % SAVE_EVERY == 0:  # a run that is killed goes on from here, to the same bits
            tierstore.checkpoint.save(store, model, [optimizer], extra={"step": first + len(losses)})
    after = hit_rate(model, stop)
    print(f"steps {first} to {stop}: next item first among {1 + NEGATIVES} in {before:.0%}, then {after:.0%}")

    torch.manual_seed(0)
    twin = SASRec(Plain(table.first_values(torch.arange(ITEMS))))
    dense = [weight for name, weight in twin.named_parameters() if not name.startswith("items")]
    both = [torch.optim.Adam(dense, lr=0.005), torch.optim.Adagrad(twin.items.parameters(), lr=0.3)]
    expected = list(train(twin, both, batches(0, stop)))[first:]
    print(f"loss {expected[-1]:.6f} with nn.Embedding, {losses[-1]:.6f} with tierstore")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)  # gradients of a row are added in another order
