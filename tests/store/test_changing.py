"""Tables that grow, get other names and optimizers, and go: killed at each step, copied, and in every tier."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.children import run
from tierstore import optim
from tierstore.dist.reshard import reshard
from tierstore.errors import TableError
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.offline.compaction import compact_store
from tierstore.offline.salvage import salvage
from tierstore.updates.apply import apply_update
from tierstore.updates.delta import write_update

DIM, DDR = 4, "1MiB"
RULES = [optim.SGD(), optim.Adagrad(), optim.RowWiseAdagrad()]


CHANGES = {
    "grow": 'store.change_table("a", num_embeddings=500, name="c")',
    "drop": 'store.drop_table("a")',
    "optimizer": 'store.change_table("a", optimizer=tierstore.optim.Adam())',
    "ids": 'store.change_table("d", num_embeddings=70, optimizer=tierstore.optim.Adam())',
    "rules": 'store.change_table("d", ids=tierstore.DynamicIds(admission=tierstore.ids.Frequency(3, 90)))',
}
KILLED = """
    import json, shutil
    from tests.faults.training_run import watch_names
    from tierstore.system import killpoints

    def change(directory, code, last):
        reached = 0
        def hook(name):
            nonlocal reached
            reached += 1
            if reached == last:
                os._exit(9)
        with tierstore.open(directory, ddr="1MiB", keep=3) as store:
            if last is not None:
                killpoints.hook = hook
                watch_names(hook)
            exec(code)
            return reached

    def copied(name):
        return shutil.copytree(sys.argv[1], Path(sys.argv[1]).parent / name)

    changes = json.loads(sys.argv[2])
    for code in changes.values():  # compiles what children use
        change(copied(f"warm {len(code)}"), code, None)
    for kind, code in changes.items():
        read, write = os.pipe()
        if not os.fork():
            os.write(write, str(change(copied(f"{kind} done"), code, -1)).encode())
            os._exit(0)
        os.wait()
        for last in range(1, int(os.read(read, 9)) + 1):
            forked(change, copied(f"{kind} {last}"), code, last)
    """


@pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")
def test_a_change_that_is_killed_at_any_step_leaves_the_old_table_or_the_new_one(tmp_path: Path) -> None:
    config = tierstore.TableConfig(name="a", num_embeddings=200, embedding_dim=DIM, optimizer=optim.Adagrad())
    with tierstore.open(tmp_path / "store", ddr=DDR, keep=3) as store:
        tables = [store.create_table(replace(config, name=name, feature_names=())) for name in ("a", "b")]
        rules = tierstore.DynamicIds(admission=tierstore.ids.Frequency(2))
        dynamic = store.create_table(replace(config, name="d", feature_names=(), num_embeddings=60, ids=rules))
        for _ in range(2):
            for table in tables:
                table.write(torch.arange(50), torch.randn(50, DIM))
            dynamic.admit(torch.arange(-20, 30))
            store.commit(extra={"k": 1}, tensors={"w": torch.ones(3)})
        before = [table.read(torch.arange(200)) for table in (*tables, dynamic)]
    run(KILLED, tmp_path / "store", json.dumps(CHANGES))
    for kind, steps in {"grow": 2, "drop": 2, "optimizer": 15, "ids": 15, "rules": 2}.items():
        ends = Counter[Any]()
        for path in tmp_path.glob(f"{kind} *"):
            with tierstore.open(path, ddr=DDR, keep=3) as store:
                shown = {name: each.config for name, each in store.tables.items()}
                ends[
                    tuple((name, each.num_embeddings, each.optimizer.kind, each.ids) for name, each in shown.items())
                ] += 1
                for name, rows in (("b", before[1]), ("d", before[2])):
                    assert torch.equal(store[name].read(torch.arange(200)), rows)
                for name in {"a", "c"} & store.tables.keys():
                    assert torch.equal(store[name].read(torch.arange(200)), before[0])
                    assert torch.equal(torch.cat([*store[name].written()]), torch.arange(50))
                assert (store.extra, store.tensors()["w"].tolist()) == ({"k": 1}, [1, 1, 1])
                store["b"].write(torch.tensor([7]), torch.ones(1, DIM))
                store.commit()
                store.verify()
        assert len(ends) == 2
        assert ends.total() > steps


def test_every_copy_of_a_store_whose_tables_changed_has_their_rows(tmp_path: Path) -> None:
    """Also rows never written, whose first values are those of the place that the table was in first."""
    source = tmp_path / "store"
    with tierstore.open(source, ddr=DDR) as store:
        for name, rule in zip("abcd", [*RULES, optim.SGD()], strict=True):
            config = tierstore.TableConfig(name=name, num_embeddings=90, embedding_dim=DIM, optimizer=rule)
            store.create_table(config).write(torch.arange(30), torch.randn(30, DIM))
        store.commit()
        store.change_table("c", name="e", num_embeddings=120)
        store.change_table("b", optimizer=optim.Adam())
        store.drop_table("a")
        with store.record(tmp_path / "trace.npz", rate=1) as recorder:
            rows = {name: table.read(torch.arange(90)) for name, table in store.tables.items()}
        store.commit()
    assert set(recorder._recorded.trace().tables) == {"e", "b", "d"}
    update = write_update(source, tmp_path / "update")
    apply_update(tmp_path / "replica", update.path)
    compact_store(source, tmp_path / "compact", trace=tmp_path / "trace.npz")
    salvage(source, tmp_path / "repaired")
    reshard(source, tmp_path / "ranks", plan=None, num_ranks=2, progress=lambda _done, _total: None)
    reshard(tmp_path / "ranks", tmp_path / "plain", plan=None, num_ranks=0, progress=lambda _done, _total: None)
    half = tierstore.quantize(source, tmp_path / "half", dtype="float16")
    assert {table.name for table in half.tables} == rows.keys()
    for name in ("store", "replica", "compact", "repaired", "ranks", "plain", "half"):
        with tierstore.open(tmp_path / name, mode="r", ddr=DDR) as store:
            assert store.tables.keys() == rows.keys()
            for table, shown in rows.items():
                assert torch.equal(store[table].read(torch.arange(90)), shown.half() if name == "half" else shown)
                assert torch.equal(torch.cat([*store[table].written()]), torch.arange(30))
            store.verify()
    with tierstore.open(source, ddr=DDR) as store:
        store.change_table("b", num_embeddings=91)
        store.commit()
    with pytest.raises(TableError, match=r"new, empty directory"):
        apply_update(
            tmp_path / "replica", write_update(source, tmp_path / "next", since=update.header.origin.version).path
        )
    for name in ("replica", "ranks/0-of-2"):
        with tierstore.open(tmp_path / name, ddr=DDR) as store, pytest.raises(TableError, match=r"reshard|published"):
            store.drop_table("d")


def test_a_table_in_use_does_not_change_and_those_of_before_are_refused() -> None:
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        bag = tierstore.TieredEmbeddingBag(
            store.create_table(tierstore.TableConfig(name="a", num_embeddings=9, embedding_dim=DIM))
        )
        with pytest.raises(ValueError, match="must be at least 9"):
            store.change_table("a", num_embeddings=8)
        held = bag(torch.tensor([[1, 2]]))
        with pytest.raises(TableError, match="in use"):
            store.change_table("a", num_embeddings=15)
        del held
        store.change_table("a", num_embeddings=15)
        with pytest.raises(TableError, match="take it again"):
            bag(torch.tensor([[1, 2]]))
