"""What run files of the tests name."""

import torch
from torch import nn

TOLD = []


class Net(nn.Module):
    """It draws, and has buffers, both of which a resumed run must go on with."""

    def __init__(self, embeddings, *, num_dense, outputs=1, norm=True):
        super().__init__()
        self.embeddings, over = embeddings, [nn.BatchNorm1d(6)] if norm else []
        width = num_dense + sum(each.embedding_dim for each in embeddings.embedding_bag_configs())
        self.score = nn.Sequential(nn.Linear(width, 6), *over, nn.Dropout(0.2), nn.Linear(6, outputs))

    def forward(self, dense, sparse):
        return self.score(torch.cat([dense, self.embeddings(sparse).values()], dim=1)).squeeze(1)
