"""What a store takes of its caller, and what it gives back: gradients, rates, ``extra``; two that make one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests import children
from tierstore import optim

CONFIG = tierstore.TableConfig(
    name="t", num_embeddings=20_000, embedding_dim=8, init=tierstore.init.Constant(1.0), optimizer=optim.SGD(lr=1.0)
)


def test_processes_that_create_one_store_at_once(store_dir: Path) -> None:
    """One wins, the other is told; the store is whole."""
    code = """
    go, hold = os.pipe()
    def create():
        os.close(hold)
        os.read(go, 1)
        try:
            store = tierstore.open(sys.argv[1], ddr="1MiB")
        except errors.StoreLockedError:
            os._exit(5)
        time.sleep(0.2)
        store.close()
        os._exit(0)
    creating = [os.fork() or create() for _ in range(2)]
    os.close(hold)
    print(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in creating))
    """
    assert children.run(code, store_dir) in ("[0, 5]\n", "[0, 0]\n")  # the second may begin when the first has ended
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store.commit() == 1


def test_per_sample_weights_get_gradients_on_a_read_only_store(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        store.create_table(CONFIG)
    with tierstore.open(store_dir, mode="r", ddr="1MiB") as store:
        weights = torch.tensor([2.0, 3.0], requires_grad=True)
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        bag(torch.tensor([4, 5]), torch.tensor([0]), weights).sum().backward()
        assert weights.grad is not None
        assert weights.grad.tolist() == [8.0, 8.0]
        assert store["t"].pool.pins.num_pinned == 0


def test_rates_and_extra_that_would_come_back_changed(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        table = store.create_table(CONFIG)
        for rate in (float("nan"), -1.0, float("inf")):
            with pytest.raises(ValueError, match="learning_rate="):
                table.learning_rate = rate
        table.learning_rate = torch.tensor(0.5)  # type: ignore[assignment]
        extras: list[dict[Any, Any]] = [{1: 2}, {"a": (1, 2)}, {"a": {2: 1}}]
        for extra in extras:
            with pytest.raises(TypeError, match="gives back as it was"):
                store.commit(extra=extra)
        with pytest.raises(TypeError, match="tensors cannot be stored"):
            store.commit(tensors={"__metadata__": torch.ones(1)})
        store.commit(extra={"a": [float("nan"), None, {"b": 1.5}]})
        assert table.learning_rate == 0.5
