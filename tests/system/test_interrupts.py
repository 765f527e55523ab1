"""Ctrl-C at bad moments, forks, and other things that happen to a process: rows are neither lost nor made up."""

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests import children
from tierstore import errors, optim
from tierstore.io import places

ROWS = 20_000
CONFIG = tierstore.TableConfig(
    name="t", num_embeddings=ROWS, embedding_dim=8, init=tierstore.init.Constant(1.0), optimizer=optim.SGD(lr=1.0)
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may hit a finaliser
def test_interrupts_at_any_moment_leave_every_row_right(store_dir: Path) -> None:
    """A thread sends SIGINT again and again while rows are trained and committed; the handler raises once a step."""
    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    done = threading.Event()

    def bother() -> None:
        while not done.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)

    steps = torch.zeros(ROWS)
    interrupted = 0
    generator = torch.Generator().manual_seed(0)
    previous = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=bother, daemon=True)
    with tierstore.open(store_dir, ddr="600KiB") as store:
        table = store.create_table(CONFIG)
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        thread.start()
        try:
            for _ in range(300):
                ids = torch.randint(0, ROWS, (400,), generator=generator)
                before = table.state.step
                try:
                    armed = True
                    bag(ids.reshape(1, -1)).sum().backward()
                    store.commit()
                    armed = False
                except KeyboardInterrupt:
                    interrupted += 1
                if table.state.step > before:
                    steps += torch.bincount(ids, minlength=ROWS)
        finally:
            done.set()
            thread.join()
            signal.signal(signal.SIGINT, previous)
        gc.collect()
        assert interrupted > 0
        assert torch.equal(table.read(torch.arange(ROWS))[:, 0], 1 - steps)
        assert table.pool.pins.num_pinned == 0
        table.pool.cache.check_integrity()
        store.commit()
    with tierstore.open(store_dir, mode="r") as store:
        assert torch.equal(store["t"].read(torch.arange(ROWS))[:, 0], 1 - steps)


def test_a_store_that_is_open_when_the_interpreter_ends_is_closed_without_a_word(store_dir: Path) -> None:
    code = """
    os.dup2(1, 2)
    store = tierstore.open(sys.argv[1], ddr="1MiB", threads=1)
    table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=20_000, embedding_dim=16))
    table.write(torch.arange(20_000), torch.ones(20_000, 16))
    store.commit()
    table.write(torch.arange(20_000), torch.zeros(20_000, 16))
    """
    assert "Traceback" not in children.run(code, store_dir)
    with tierstore.open(store_dir) as store:
        assert store.verify().rows == 20_000
        assert store["t"].read(torch.tensor([7])).tolist() == [[1.0] * 16]


def test_a_store_that_is_dropped_gives_its_lock_back(store_dir: Path) -> None:
    store = tierstore.open(store_dir, ddr="1MiB")
    store.create_table(CONFIG).read(torch.arange(5))
    del store
    gc.collect()
    gc.disable()  # a store without tables refers to itself nowhere
    try:
        store = tierstore.open(store_dir.with_name("empty"), ddr="1MiB")
        store.commit()
        del store
        tierstore.open(store_dir.with_name("empty"), ddr="1MiB").close()
    finally:
        gc.enable()
    tierstore.open(store_dir, ddr="1MiB").close()


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
        time.sleep(0.5)
        store.close()
        os._exit(0)
    creating = [os.fork() or create() for _ in range(2)]
    os.close(hold)
    print(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in creating))
    """
    assert children.run(code, store_dir) in ("[0, 5]\n", "[0, 0]\n")  # the second may begin when the first has ended
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store.commit() == 1


def test_a_table_too_large_for_the_machine_leaves_the_store_usable(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no address space")

    with tierstore.open(store_dir, ddr="1MiB") as store:
        with monkeypatch.context() as patch:
            patch.setattr(places, "zeros", refuse)
            with pytest.raises(errors.BudgetError, match=r"refuses 381.5 MiB of address space"):
                store.create_table(tierstore.TableConfig(name="vast", num_embeddings=10**8, embedding_dim=64))
        store.create_table(CONFIG)
        store.commit()
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert list(store.tables) == ["t"]


def test_a_failed_manifest_can_be_tried_again(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore.store.manifest import Manifest

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with tierstore.open(store_dir, ddr="1MiB") as store:
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "write", refuse)
            with pytest.raises(OSError, match="No space left"):
                store.create_table(CONFIG)
        assert "t" not in store
        store.create_table(CONFIG).write(torch.tensor([3]), torch.full((1, 8), 7.0))
        store.commit()
    with tierstore.open(store_dir, mode="r") as store:
        assert store["t"].read(torch.tensor([3]))[0, 0] == 7.0


def test_inference_mode(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store, torch.inference_mode():
        bag = tierstore.TieredEmbeddingBag(store.create_table(CONFIG), mode="sum")
        assert bag(torch.tensor([[1, 2]])).tolist() == [[2.0] * 8]


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


@pytest.mark.parametrize("rate", [float("nan"), -1.0, float("inf")])
def test_wrong_learning_rates(store_dir: Path, rate: float) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        table = store.create_table(CONFIG)
        with pytest.raises(ValueError, match="learning_rate="):
            table.learning_rate = rate
        table.learning_rate = torch.tensor(0.5)  # type: ignore[assignment]
        store.commit()
        assert table.learning_rate == 0.5


@pytest.mark.parametrize("extra", [{1: 2}, {"a": (1, 2)}, {"a": {2: 1}}])
def test_extra_that_would_come_back_changed(store_dir: Path, extra: dict[Any, Any]) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        with pytest.raises(TypeError, match="gives back as it was"):
            store.commit(extra=extra)
        with pytest.raises(TypeError, match="tensors cannot be stored"):
            store.commit(tensors={"__metadata__": torch.ones(1)})
        store.commit(extra={"a": [float("nan"), None, {"b": 1.5}]})
