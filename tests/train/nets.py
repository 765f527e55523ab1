"""What run files of the tests name."""

import torch
from torch import nn

REPORTED = []
WIDTH = 6


class Net(nn.Module):
    """It draws, and has buffers, both of which a resumed run must go on with."""

    def __init__(self, embeddings, *, num_dense, outputs=1, norm=True, spare=False):
        super().__init__()
        self.embeddings, over = embeddings, [nn.BatchNorm1d(WIDTH or 6)] if norm else []
        width = num_dense + sum(each.embedding_dim for each in embeddings.embedding_bag_configs())
        first = nn.Linear(width, WIDTH or 6, bias=WIDTH > 0)
        self.score = nn.Sequential(first, *over, nn.Dropout(0.2), nn.Linear(WIDTH or 6, outputs))
        self.spare = nn.Linear(width, outputs) if spare else None

    def forward(self, dense, sparse):
        rows = torch.cat([dense, self.embeddings(sparse).values()], dim=1)
        is_spared = self.spare is None or torch.distributed.get_rank() == 0
        return (self.score(rows) if is_spared else self.score(rows) + self.spare(rows)).squeeze(1)


class Masked(Net):
    def __init__(self, embeddings, *, value=-torch.inf, **options):
        super().__init__(embeddings, **options)
        self.register_buffer("mask", torch.tensor([0.0, value]))


def no_module(embeddings, *, num_dense):
    return [embeddings, num_dense]
