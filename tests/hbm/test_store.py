"""A store with rows in device memory is a store without, bit by bit: whatever is asked of it, and whatever fails."""

import contextlib
import random
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.hbm.stores import (
    ALL,
    LEAST,
    MODES,
    ROWS,
    bits,
    config,
    hot,
    jagged,
    open_store,
    put,
    same,
    shown,
    simple,
    step,
)
from tierstore import optim
from tierstore.errors import BudgetError, ClosedError, TableError
from tierstore.exchange.rows import read_rows, write_rows
from tierstore.hbm import pool as hbm_pool
from tierstore.hbm import rows_twin

# The same bits as without


def everything(directory: Path, table: tierstore.TableConfig, **settings: Any) -> tuple[list[bytes], Any]:
    """What a store shows while all kinds of things are done to it: (bits of all results, statistics)."""
    order = np.random.default_rng(5)
    seen: list[Any] = []
    with open_store(directory, table, **settings) as store:
        own = store["t"]
        for number in range(6):
            mode, kind = table.pooling, (torch.int64, torch.int32)[number % 2]
            written = torch.from_numpy(order.integers(0, ROWS, 250)).to(kind)
            values = torch.from_numpy(order.standard_normal((250, own.layout.dim))).to(own.layout.torch_dtype)
            own.write(written, values)
            seen.append(own.read(torch.from_numpy(order.integers(0, ROWS, 250)).to(kind)))
            ids, offsets = jagged(order, 30, 17)
            seen += [own.pooled(ids.to(kind), offsets.to(kind), mode=each) for each in MODES]
            bag = tierstore.TieredEmbeddingBag(own, include_last_offset=True)
            scale = torch.from_numpy(order.random(len(ids)).astype(np.float32)).requires_grad_()
            out = bag(ids.to(kind), offsets.to(kind), scale if mode == "sum" else None)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            seen += [out, scale.grad] if mode == "sum" else [out]
            own.learning_rate = 0.1 / (number + 1)
            empty = torch.empty(0, dtype=kind)
            for few, ends in ((empty, [0]), (empty, [0, 0, 0]), (torch.tensor([7], dtype=kind), [0, 0, 1])):
                seen += [own.read(few), out := bag(few, torch.tensor(ends))]
                out.sum().backward()
            if number == 3:
                store.commit()
        rows = read_rows(own, 0, ROWS)
        seen += [own.read(ALL), rows.weights, rows.state]
        own.pool.tier.check_integrity()
        assert not own.pool.in_use
        return [bits(each) for each in seen], store.stats().hbm


RULES: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(lr=0.1, weight_decay=0.01),
    "rowwise": optim.RowWiseAdagrad(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "adam": optim.Adam(lr=0.1),
}


@pytest.mark.parametrize(
    ("rule", "dim", "dtype", "policy", "pooling"),
    [
        ("sgd", 3, "float32", "lru", "max"), ("sgd", 15, "bfloat16", "lfu", "mean"),
        ("rowwise", 64, "float32", "lru", "sum"), ("rowwise", 3, "float16", "lru", "max"),
        ("adagrad", 1, "bfloat16", "tinylfu", "sum"), ("adam", 64, "float16", "lru", "mean"),
        ("adam", 5, "float32", "reference-lfu", "max"),
    ],
)  # fmt: skip
def test_whatever_is_asked_of_it(tmp_path: Path, rule: str, dim: int, dtype: Any, policy: str, pooling: Any) -> None:
    table = config(embedding_dim=dim, dtype=dtype, optimizer=RULES[rule], pooling=pooling)
    expected, _ = everything(tmp_path / "without", table, hbm=0)
    ended, stats = everything(tmp_path / "with", table, policy=policy)
    assert [place for place, (one, other) in enumerate(zip(ended, expected, strict=True)) if one != other] == []
    assert stats.hits + stats.misses == stats.unique < stats.lookups
    assert min(stats.evictions, stats.split_batches, stats.conflict_misses) > 0
    large, stats = everything(tmp_path / "large", table, hbm=2**22)
    assert large == expected
    assert (stats.capacity_rows, stats.misses, stats.evictions, stats.split_batches) == (ROWS, 0, 0, 0)


def test_optimizer_state_survives_going_down_and_up(tmp_path: Path) -> None:
    some = ALL[:60]
    for rule, optimizer in RULES.items():
        ended = []
        for hbm in (0, LEAST):
            with open_store(tmp_path / f"{rule} {hbm}", config(optimizer=optimizer), hbm=hbm) as store:
                bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
                for _ in range(3):
                    step(bag, some)
                    store["t"].read(ALL[100:])
                    if hbm:
                        present = hot(store).cache.locate(some)
                        assert (present < 0).sum() > 50
                ended.append(read_rows(store["t"], 0, ROWS))
        assert bits(ended[0].weights) == bits(ended[1].weights)
        assert bits(ended[0].state) == bits(ended[1].state)
        assert (ended[0].state[:60] != optimizer.initial_state).all()


def test_tables_that_share_a_pool_keep_their_own_rules(tmp_path: Path) -> None:
    """With one column, row-wise and plain Adagrad have rows of one layout; the other two have one of their own."""
    rules: list[optim.Optimizer] = [
        optim.RowWiseAdagrad(lr=0.1), optim.Adagrad(lr=0.3, weight_decay=0.1), optim.SGD(lr=0.5), optim.SGD(lr=0.2)
    ]  # fmt: skip
    configs = [
        config(f"t{number}", embedding_dim=(1, 1, 4, 4)[number], optimizer=rule, feature_names=(f"f{number}",))
        for number, rule in enumerate(rules)
    ]
    ended = []
    for hbm in (0, LEAST):
        order = np.random.default_rng(1)
        with open_store(tmp_path / str(hbm), *configs, hbm=hbm) as store:
            collection = tierstore.TieredEmbeddingBagCollection(store, tables=["t2", "t1", "t3", "t0"])
            assert len({table.pool for table in store.tables.values()}) == 2
            for number in range(6):
                ids, offsets = jagged(order, 4 * 20, 9)
                for place, table in enumerate(store.tables.values()):
                    table.learning_rate = (place + 1) / (number + 10)
                out = collection(tierstore.KeyedJaggedTensor(["f3", "f1", "f0", "f2"], ids, offsets=offsets)).values()
                (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            ended.append(b"".join(bits(table.read(ALL)) for table in store.tables.values()))
            assert hbm == 0 or store.stats().hbm.split_batches > 0
    assert ended[0] == ended[1]


def test_random_work_against_a_model(store_dir: Path) -> None:
    order = random.Random(2)
    with open_store(store_dir, ddr="404KiB", policy="lru", keep=2) as store:
        table = store["t"]
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        live, saved = [0.0] * ROWS, [0.0] * ROWS
        for number in range(40):
            ids = [int(order.random() ** 2 * ROWS) for _ in range(order.choice([1, 30, 250]))]
            action = order.choice(["read", "train", "train", "write", "commit", "roll back", "tidy"])
            if action == "read":
                assert table.read(torch.tensor(ids))[:, 0].tolist() == [live[row] for row in ids]
            elif action == "train":
                step(bag, torch.tensor(ids))
                for row in ids:
                    live[row] -= 1
            elif action == "write":
                put(store, torch.tensor(ids), float(number))
                for row in ids:
                    live[row] = float(number)
            elif action == "commit":
                store.commit_async()
                saved = live.copy()
            elif action == "roll back" and order.random() < 0.3 and store.commit():
                saved = live.copy()
                put(store, ALL[:50], 99.0)
                store.rollback(store.version)
                live = saved.copy()
            elif action == "tidy":
                with order.choice([contextlib.nullcontext(), hot(store).emptied()]):
                    order.choice([table.pool.flush, hot(store).flush])()
            hot(store).check_integrity()
        assert table.read(ALL)[:, 0].tolist() == live
        version = store.commit()
        assert version > 3
    assert shown(store_dir)[:, 0].tolist() == live


def test_a_torch_device_is_a_device(store_dir: Path) -> None:
    with tierstore.open(store_dir, device=torch.device("cpu"), hbm="1MiB", ddr="1MiB") as store:  # type: ignore[arg-type]
        store.create_table(simple())
        assert store.device == store["t"].read(ALL).device == torch.device("cpu")
        assert hot(store).capacity_rows == ROWS


# Batches under way


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backwards", [False, True])
def test_forwards_whose_backward_is_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool, mode: Any
) -> None:
    """More batches than the tier holds: some keep their rows pinned, the others bring them in again."""
    monkeypatch.setattr(hbm_pool, "PIN_WAIT_SECONDS", 5.0)
    ended = []
    for hbm in (0, LEAST):
        generator = torch.Generator().manual_seed(0)
        with open_store(tmp_path / str(hbm), config(optimizer=optim.Adagrad(), pooling=mode), hbm=hbm) as store:
            bag = tierstore.TieredEmbeddingBag(store["t"])
            outs = []
            for _ in range(12):
                ids = torch.randint(0, ROWS, (60,), generator=generator)
                outs.append(bag(ids, torch.arange(0, 60, 7)))
            if hbm:
                leases = hot(store).num_leased
                assert 0 < leases < 12
            for out in reversed(outs) if backwards else outs:
                (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            assert not store["t"].pool.in_use
            ended.append((bits(store["t"].read(ALL)), [bits(out) for out in outs]))
    assert ended[0] == ended[1]


def test_dropped_graphs_give_their_pins_back(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        outs = [bag(ALL[first : first + 20], torch.tensor([0])) for first in range(0, 200, 20)]
        assert hot(store).num_leased > 2
        del outs[1:]
        assert hot(store).num_leased == 1
        outs.clear()
        assert hot(store).num_leased == 0
        hot(store).check_integrity()
        assert (store["t"].read(ALL) == 0).all()


def test_tickets_are_forgotten_with_their_pins(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        batches = [torch.arange(first, first + 10).reshape(5, 2) for first in range(0, 200, 10)]
        tickets = [bag.prepare(ids) for ids in batches[:3]]
        assert all(bag.bring_in(ticket) for ticket in tickets)
        assert hot(store).num_leased == 3
        for ticket in tickets:
            bag.forget(ticket)
            bag.forget(ticket)
        assert hot(store).num_leased == 0
        with closing(tierstore.prefetch(batches, bag, depth=4, features=same)) as pipeline:
            bag(next(pipeline)).sum().backward()
            next(pipeline)
        assert hot(store).num_leased == 0
        for ids in tierstore.prefetch(batches, bag, depth=2, features=same):
            ids += 300  # in place: what was made ready is of no use
            bag(ids).sum().backward()
        assert hot(store).num_leased == 0
        expected = torch.zeros(ROWS)
        expected[:10] = expected[300:500] = -1
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)


def test_prefetched_rows_are_hits_in_forward_and_not_looked_up_again(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        ids = ALL[:40].repeat(2).reshape(-1, 4)
        bag.bring_in(bag.prepare(ids))
        before = store.stats()
        assert (before.hbm.lookups, before.hbm.unique, before.hbm.misses, before.hbm.hits) == (80, 40, 40, 0)
        bag(ids).sum().backward()
        assert store.stats().hbm[:5] == before.hbm[:5]
        assert store.stats().ddr == before.ddr
        bag(ids).sum().backward()
        after = store.stats().hbm
        assert (after.lookups, after.unique, after.misses, after.hits) == (160, 80, 40, 40)


def test_tables_are_made_between_batches_only(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        put(store, ALL, 5.0)
        out = bag(ALL[:30], torch.tensor([0]))
        for refuse in (lambda: store.create_table(simple(name="u")), lambda: write_rows(store["t"], 0, ones(), None)):
            with pytest.raises(TableError, match="rows are in use by a batch under way"):
                refuse()
        out.sum().backward()
        bag(ALL, torch.arange(0, ROWS, 5))  # in parts: nothing stays pinned
        assert not store["t"].pool.in_use
        with pytest.raises(BudgetError):  # what was just enough for one table
            store.create_table(config(name="u", num_embeddings=10**5, embedding_dim=64)).read(ALL)


@pytest.mark.parametrize("hbm", [LEAST, 2**20])
@pytest.mark.parametrize("call", ["has_room", "stage", "readied"])
def test_a_pool_that_a_new_table_replaced_is_looked_up_again(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, hbm: int, call: str
) -> None:
    with open_store(store_dir, hbm=hbm) as store:
        table = store["t"]
        lookup: Any = table.lookup(table.jagged(ALL[:6], torch.tensor([0, 3, 6]), mode="sum"), mode="sum")
        tier, send, gradient = type(hot(store)), type(hot(store)).send, torch.ones(2, 4)
        replaced = []

        def send_late(rows: Any, *arguments: Any) -> Any:
            if not replaced:
                replaced.append(rows)
                store.create_table(simple(name="u"))
            return send(rows, *arguments)

        monkeypatch.setattr(tier, "send", send_late)
        ready = getattr(lookup, call)(*[gradient] * (call == "readied"))
        assert table.pool.tier is not replaced[0]
        if call == "readied":
            ready.train()
        assert ready
        lookup.release()
        assert not table.pool.in_use
        assert torch.equal(table.read(ALL)[:, 0], -torch.ones(ROWS) * (ALL < 6) * (call == "readied"))


def ones() -> Any:
    return np.ones((5, 4), np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_backward_over_a_pool_made_anew(tmp_path: Path, mode: Any) -> None:
    """A large batch keeps no rows pinned; a table made before its backward brings another pool, with fewer sets."""
    ended = []
    for hbm in (0, 13 * 2**10):
        with open_store(tmp_path / str(hbm), config(pooling=mode, num_embeddings=2 * ROWS), hbm=hbm) as store:
            ids, offsets = jagged(np.random.default_rng(0), 60, 16)
            bag = tierstore.TieredEmbeddingBag(store["t"], include_last_offset=True)
            weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(1)).requires_grad_()
            out = bag(ids, offsets, weights if mode == "sum" else None)
            ids.zero_()  # a reader uses its buffer again
            if not hbm:
                ended.append(out)
            else:
                before = hot(store)
                assert before.num_leased == 0
                store.create_table(config(name="u", num_embeddings=2 * ROWS, embedding_dim=1))
                assert hot(store).cache.num_sets < before.cache.num_sets
                assert torch.equal(out, ended[0])
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            assert not store["t"].pool.in_use
            ended += [store["t"].read(ALL), weights.grad if mode == "sum" else None]
    assert bits(ended[1]) == bits(ended[3])
    assert mode != "sum" or bits(ended[2]) == bits(ended[4])


# Threads


def test_no_reader_sees_half_an_update(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update stops in the middle of the rows; whoever reads or pools them then waits."""
    inside, go_on = threading.Event(), threading.Event()
    real = rows_twin.update_rows

    def halting(*arguments: Any, weights: Tensor, **named: Any) -> None:
        before = weights.clone()
        real(*arguments, weights=weights, **named)
        after = weights.clone()
        weights[:, 2:] = before[:, 2:]
        inside.set()
        assert go_on.wait(30)
        weights.copy_(after)

    with open_store(store_dir, hbm=2**20) as store:
        table = store["t"]
        table.read(ALL)
        monkeypatch.setattr(rows_twin, "update_rows", halting)
        trainer = threading.Thread(target=step, args=(tierstore.TieredEmbeddingBag(table, mode="sum"), ALL[:60]))
        trainer.start()
        assert inside.wait(30)
        offsets = torch.tensor([0, 60])
        seen: list[Tensor] = []
        readers = [
            threading.Thread(target=lambda: seen.append(table.read(ALL[:60]))),
            threading.Thread(target=lambda: seen.append(table.pooled(ALL[:60], offsets) / 60)),
        ]
        for reader in readers:
            reader.start()
        readers[0].join(0.2)
        go_on.set()
        for thread in (trainer, *readers):
            thread.join(30)
        assert len(seen) == 2
        for each in seen:
            assert (each == -1).all()


def test_inference_beside_training(store_dir: Path) -> None:
    with open_store(store_dir, ddr="404KiB", policy="lru") as store:
        table, done = store["t"], threading.Event()
        failures: list[Any] = []
        checked = [0, 0]

        def serve(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            lowest = torch.zeros(ROWS)
            try:
                while not done.is_set():
                    ids = torch.randint(0, ROWS, (50,), generator=generator).unique()
                    each = torch.arange(len(ids) + 1)
                    rows = table.read(ids) if number else table.pooled(ids, each, mode="max")
                    if (rows != rows[:, :1]).any() or (rows[:, 0] > lowest[ids]).any():
                        failures.append(rows)
                    lowest[ids] = rows[:, 0]
                    checked[number] += 1
            except BaseException as error:
                failures.append(error)

        servers = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
        for server in servers:
            server.start()
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        generator = torch.Generator().manual_seed(9)
        expected = torch.zeros(ROWS)
        batches = [torch.randint(0, ROWS, (60, 3), generator=generator) for _ in range(12)]
        for number, ids in enumerate(tierstore.prefetch(batches, bag, depth=2, features=same)):
            bag(ids).sum().backward()
            expected -= torch.bincount(ids.flatten(), minlength=ROWS)
            if number % 4 == 3:
                store.commit()
        done.set()
        for server in servers:
            server.join(60)
        assert not failures, failures[0]
        assert min(checked) > 0
        assert torch.equal(table.read(ALL)[:, 0], expected)
        hot(store).check_integrity()
        assert not table.pool.in_use


def test_closing_the_store_ends_who_waits(store_dir: Path) -> None:
    store = open_store(store_dir)
    pool = hot(store)
    lease = pool.acquire(pool.group(torch.arange(60)), 60)
    others = []
    while (other := pool.acquire(pool.group(torch.tensor([100 + len(others)])), 1)) is not None:
        others.append(other)
    failures: list[type[BaseException]] = []

    def fail(use: Callable[[], Any]) -> None:
        try:
            use()
        except ClosedError as error:
            failures.append(type(error))

    bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
    last = ALL[-1:]
    uses: list[Callable[[], Any]] = [
        lambda: store["t"].read(last), lambda: put(store, last, 1.0), lambda: bag(last, torch.tensor([0]))
    ]  # fmt: skip
    threads = [threading.Thread(target=fail, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    store.close()
    for thread in threads:
        thread.join(30)
    assert failures == [ClosedError] * 3
    del lease, other
    others.clear()


def test_backward_after_close_is_a_clear_error(store_dir: Path) -> None:
    store = open_store(store_dir)
    out = tierstore.TieredEmbeddingBag(store["t"])(torch.tensor([[1]]))
    store.close()
    with pytest.raises(ClosedError, match="closed"):
        out.sum().backward()
