"""Small runs whose results nobody wants: they use the kernels that training and serving on a CPU need."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .. import optim
from ..config import TableConfig
from ..ids.texts import FROM_ZERO, text_categories
from ..nn.collection import TieredEmbeddingBagCollection
from ..nn.embedding import TieredEmbedding, TieredEmbeddingBag
from ..nn.jagged import KeyedJaggedTensor
from ..nn.prefetch import prefetch
from ..offline.quantization import quantize
from ..serve.messages import InferTensor
from ..serve.models.dense import Int8Linear
from ..serve.models.jagged import Features, merge
from ..store import open_store
from ..train import RunConfig, train
from ..train.config import DataSection, EmbeddingSection, ModelSection, StoreSection, TrainSection
from ..train.demo import write_synthetic

Work = Callable[[Path], None]  # does it in a new folder

_BUDGET: Final = "600KiB"
_MANY: Final = 400  # Rows, more than fit; and ``_FEW`` do
_FEW: Final = 40
_ITEM: Final = TableConfig(name="item", num_embeddings=_FEW, embedding_dim=252, optimizer=optim.RowWiseAdagrad(lr=0.05))
_IDS: Final = torch.tensor([3, 39, 3, 17])
_OFFSETS: Final = torch.tensor([0, 2, 4])


def first_run() -> list[Work]:
    """The README's example, where rows are evicted and where all fit."""
    return [partial(_example, rows) for rows in (_MANY, _FEW)]


def _example(rows: int, folder: Path) -> None:
    with open_store(folder, ddr=_BUDGET, threads=1) as store:
        store.create_table(replace(_ITEM, num_embeddings=rows))
        TieredEmbeddingBag(store["item"])(_IDS, _OFFSETS[:-1]).sum().backward()
        store.commit()


def everything() -> list[Work]:
    """Each dtype, pooling and optimizer; evicted rows and resident ones; reading, following, rows of fewer bits."""
    kinds: list[dict[str, Any]] = [
        {},
        {"pooling": "max"},
        {"dtype": "bfloat16", "pooling": "mean"},
        {"dtype": "float16", "rounding": "stochastic"},
        {"optimizer": optim.SGD()},
    ]
    tables = [replace(_ITEM, num_embeddings=rows, **kind) for rows in (_MANY, _FEW) for kind in kinds]
    runs = [partial(_train, table) for table in tables]
    return [*first_run(), *runs, *(partial(_serve, rows) for rows in (_MANY, _FEW)), _answer_requests, _train_file]


def _train(table: TableConfig, folder: Path) -> None:
    with open_store(folder, ddr=_BUDGET, threads=1) as store:
        store.create_table(table)
        store.create_table(replace(table, name="other", feature_names=("other",)))
        module = TieredEmbeddingBagCollection(store)
        for ids in (_IDS, _IDS.int()):
            one = KeyedJaggedTensor(["item", "other"], ids, offsets=torch.arange(5))
            for batch in prefetch([one] * 2, module, depth=1, features=lambda given: given):
                module(batch).values().sum().backward()
        bag = TieredEmbeddingBag(store["item"])
        if table.pooling == "sum":
            bag(_IDS, _OFFSETS[:-1], per_sample_weights=torch.ones(4, requires_grad=True)).sum().backward()
        optimizer = store.optimizer()
        for result in (bag(_IDS, _OFFSETS[:-1]), TieredEmbedding(store["item"])(_IDS)):
            result.sum().backward()
            optimizer.step()
            optimizer.clip_grad_norm_()
            optimizer.step()
            optimizer.zero_grad()
        store["item"].write(_IDS, store["item"].read(_IDS))
        store.commit_async().result()
    with open_store(folder, mode="r", ddr=_BUDGET, threads=1) as store:
        store["item"].pooled(_IDS, _OFFSETS, mode="mean")


def _answer_requests(_: Path) -> None:
    text_categories([b"red"], FROM_ZERO)
    ids, lengths = InferTensor("INT64", np.arange(3)), InferTensor("INT32", np.array([1, 2], np.int32))
    merge([Features("rows", {"item": 4}, None).parse({"values": ids, "lengths": lengths})] * 2)
    Int8Linear(torch.ones(1, 1), None)(torch.ones(1, 1))


def _serve(rows: int, folder: Path) -> None:
    with open_store(folder, ddr=_BUDGET, threads=1) as store:
        store.create_table(replace(_ITEM, num_embeddings=rows, optimizer=optim.SGD()))
        for first in range(0, rows, rows // 2):  # dirty rows are evicted
            store["item"].write(torch.arange(first, first + rows // 2), torch.ones(rows // 2, _ITEM.embedding_dim))
        store.commit()
        with open_store(folder, mode="r", ddr=_BUDGET, threads=1) as reader:
            reader._cold.reader.is_cold = True  # type: ignore[attr-defined]
            reader["item"].read(_IDS)
            reader.rehearse_newer()
            store["item"].write(_IDS, torch.zeros(4, _ITEM.embedding_dim))
            store.commit()
            newer = reader.find_newer()
            if newer is not None:
                newer.show()
            reader["item"].pooled(_IDS, _OFFSETS)
    for dtype in ("int8", "int4"):
        quantize(folder, folder.with_name(f"{folder.name}-{dtype}"), dtype=dtype)
        with open_store(folder.with_name(f"{folder.name}-{dtype}"), mode="r", ddr=_BUDGET, threads=1) as store:
            store["item"].read(_IDS)
            store["item"].pooled(_IDS, _OFFSETS)
        with open_store(folder, mode="r", ddr=_BUDGET, threads=1, dtype=dtype) as store:
            store["item"].pooled(_IDS, _OFFSETS, mode="max")


def _train_file(folder: Path) -> None:
    """With a reader of files, and batches that are fetched ahead."""
    folder.mkdir()
    write_synthetic(path := folder / "clicks.tsv", train_rows=32, test_rows=8)
    train(
        RunConfig(
            data=DataSection(path=str(path), train_rows=32, test_rows=8),
            store=StoreSection(path=str(folder / "store"), ddr="1MiB"),
            embedding=EmbeddingSection(dim=4, num_embeddings=(100,) * 26),
            model=ModelSection(bottom_mlp=(4,), top_mlp=(4,)),
            train=TrainSection(batch_size=16),
        )
    )
