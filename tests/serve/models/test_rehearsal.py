"""Every model can be rehearsed: a first row's request is one that it takes."""

import logging
from pathlib import Path

import pytest

import tierstore
from tierstore.serve.models import Models, rehearse


def test_every_model_is_asked_once_alone_and_once_beside_another(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        for name, pooling in (("a", "sum"), ("b", "mean"), ("c", "max")):
            store.create_table(
                tierstore.TableConfig(name=name, num_embeddings=5, embedding_dim=4, pooling=pooling)  # type: ignore[arg-type]
            )
        store.commit()
    with tierstore.open(store_dir, mode="r", ddr="2MiB") as store:
        models = Models(store).by_name
        assert set(models) == {"pooled", "rows", *(f"{kind}.{name}" for kind in ("pooled", "rows") for name in "abc")}
        ran: list[tuple[str, int]] = []
        for name, model in models.items():
            run = model.run
            monkeypatch.setattr(
                model, "run", lambda queries, run=run, name=name: ran.append((name, len(queries))) or run(queries)
            )
        with caplog.at_level(logging.WARNING):
            rehearse(models.values())
        assert list(dict.fromkeys(ran)) == [(name, count) for name in models for count in (1, 2)]
        assert not [record for record in caplog.records if record.name == "tierstore.serve"]
