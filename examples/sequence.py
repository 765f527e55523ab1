"""A next-item model over sessions: TieredEmbedding, a GRU, and the true next item ranked among random ones."""

import torch
from torch import Tensor, nn

import tierstore

ITEMS, DIM, BATCH, LONGEST, NEGATIVES = 20_000, 32, 128, 8, 20


def sessions(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Items seen [B, LONGEST], 0 before a session begins; lengths are 2 to 8. Candidates [B, 1 + NEGATIVES], the true
    next item first. Popular items are asked for most; who looks at item i looks at item i + 1 next."""
    random = torch.Generator().manual_seed(step)
    last = 10 + ((ITEMS - 20) * torch.rand(BATCH, 1, generator=random) ** 6).long()
    seen = last - torch.arange(LONGEST - 1, -1, -1)
    length = torch.randint(2, LONGEST + 1, (BATCH, 1), generator=random)
    seen[torch.arange(LONGEST) < LONGEST - length] = 0
    others = 1 + ((ITEMS - 1) * torch.rand(BATCH, NEGATIVES, generator=random) ** 6).long()
    return seen, torch.cat([last + 1, others], dim=1), torch.zeros(BATCH, dtype=torch.int64)


class NextItem(nn.Module):
    def __init__(self, items: tierstore.Table) -> None:
        super().__init__()
        self.items = tierstore.TieredEmbedding(items, padding_idx=0)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, seen: Tensor, candidates: Tensor) -> Tensor:
        """Scores [B, C]. Both lookups are in one table; a backward pass updates each row once."""
        _, state = self.gru(self.items(seen))  # [1, B, DIM]
        return torch.einsum("bd,bcd->bc", state[0], self.items(candidates))


def hit_rate(model: nn.Module) -> float:
    with torch.no_grad():  # looks up and updates nothing
        hits = [model(seen, candidates).argmax(1) == 0 for seen, candidates, _ in map(sessions, range(10_000, 10_010))]
    return torch.cat(hits).float().mean().item()


torch.manual_seed(0)
with tierstore.open(cold="memory", ddr="16MiB") as store:  # or a directory, as tierstore.open("shop", ddr="64MiB")
    config = tierstore.TableConfig(
        name="item",
        num_embeddings=ITEMS,
        embedding_dim=DIM,
        init=tierstore.init.Normal(std=0.1),
        optimizer=tierstore.optim.Adam(lr=0.01),
    )
    model = NextItem(store.create_table(config))
    optimizer = torch.optim.Adam(model.gru.parameters(), lr=0.005)
    print(f"next item first among {1 + NEGATIVES}: {hit_rate(model):.0%} before")
    for seen, candidates, true_place in map(sessions, range(120)):
        loss = nn.functional.cross_entropy(model(seen, candidates), true_place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tierstore.checkpoint.save(store, model, [optimizer])  # in a directory, what was not committed is gone after close()
    print(f"next item first among {1 + NEGATIVES}: {hit_rate(model):.0%} after 120 steps")
