"""What rows hold, and what differs between versions and stores, against plain numpy."""

import json

import numpy as np
import pytest
import torch

import tierstore
from tierstore.cli import main
from tierstore.ids import LFU, DynamicIds
from tierstore.offline.rows import diff, rows_of

ROWS = 70_000  # more than are read at a time


@pytest.fixture
def versions(tmp_path):
    """By version of the store in ``tmp_path / "shop"``: of "item" all rows, of "user" rows by id, rows ever written."""
    draw, users, found = np.random.default_rng(3), {}, {}
    with tierstore.open(tmp_path / "shop", ddr="8MiB", keep=5) as store:
        for name, ids in (("item", None), ("user", DynamicIds(eviction=LFU())), ("gone", None)):
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=4, ids=ids))
        items = store["item"].first_values(torch.arange(ROWS)).numpy()
        for version in (1, 2, 3):
            ids = draw.choice(ROWS, 69_000 if version == 1 else 50, replace=False)
            items[ids], items[ids[:3]], items[ids[3 : version + 1], 1] = draw.normal(size=(len(ids), 4)), 0, np.nan
            store["item"].write(torch.from_numpy(ids), torch.from_numpy(items[ids]))
            own = torch.arange(version, 3 * version) * 2**40 - 5
            store["user"].admit(own.repeat_interleave(torch.arange(len(own)) + 1))
            store["user"].write(own, torch.full((len(own), 4), float(version)))
            store["user"].evict(own[:1])
            users = users | dict.fromkeys(own.tolist()[1:], version)
            users.pop(int(own[0]), None)
            kind = torch.int64 if version == 1 else torch.float32
            dense = {"n": torch.tensor(version), "nan": torch.tensor(np.nan), "type": torch.ones(1, dtype=kind)}
            store.commit(tensors={**dense, f"w{version}": torch.ones(1)})
            found[version] = items.copy(), users, torch.cat([*store["item"].written()]).numpy()
    return found


def test_rows_are_counted_and_measured_as_numpy_does(versions, tmp_path, capsys):
    items, users, written = versions[3]
    norms = np.linalg.norm(items[written].astype(np.float64), axis=1)
    found, bad = rows_of(str(tmp_path / "shop")), written[np.isnan(norms)].tolist()
    quantiles = found["item"].pop("norms")
    assert [*quantiles.values()] == pytest.approx(np.nanquantile(norms, (0, 0.5, 0.9, 0.99, 1)), rel=1e-12)
    counts = {"rows": ROWS, "never_trained": ROWS - len(written), "zero": np.count_nonzero(norms == 0)}
    assert found["item"].pop("most_used").startswith("not counted: ")
    assert found["item"] == counts | {"not_finite": 1, "not_finite_ids": bad}
    assert (found["gone"]["norms"], found["user"]["never_trained"]) == ({}, ROWS - len(users))
    assert found["user"]["most_used"][0] == (5 * 2**40 - 5, 7)
    assert main(["inspect", "--rows", "--json", str(tmp_path / "shop@1")]) == 0
    assert json.loads(capsys.readouterr().out)["item"]["never_trained"] == 1000


@pytest.mark.parametrize("is_copy", [False, True])
def test_differences_are_those_of_numpy(versions, tmp_path, capsys, is_copy):
    """Within a store by what was written since; from a copy that has gone on by itself, by all rows."""
    shop, before = str(tmp_path / "shop"), str(tmp_path / "shop@1")
    if is_copy:
        with tierstore.open(shop, mode="r", ddr="8MiB") as store:
            store.backup(before := str(tmp_path / "copy"))
        with tierstore.open(before, ddr="8MiB", keep=5) as store:
            store.rollback(1)
            store.create_table(tierstore.TableConfig(name="other", num_embeddings=3, embedding_dim=2))
            store.commit(tensors=store.tensors())
        with tierstore.open(shop, ddr="8MiB", keep=5) as store:
            store.drop_table("gone")
            store.change_table("item", name="items", feature_names=["item"], num_embeddings=ROWS + 7)
    (items, users, _), (others, own, _), found = versions[1], versions[3], diff(before, shop)
    by, both = np.linalg.norm(others.astype(np.float64) - items, axis=1), users.keys() & own.keys()
    item, user = found["tables"].pop("items" if is_copy else "item"), found["tables"].pop("user")
    assert item["changed"] == np.count_nonzero((items.view(np.int32) != others.view(np.int32)).any(axis=1))
    largest = np.argsort(-np.nan_to_num(by, nan=np.inf), kind="stable")[:10].tolist()
    assert item["largest_changes"] == [(each, pytest.approx(by[each]) if by[each] > 0 else "nan") for each in largest]
    grown = {"name": ["item", "items"], "num_embeddings": [ROWS, ROWS + 7]} if is_copy else {}
    changed = {"added": len(own) - len(both), "removed": len(users) - len(both)}
    changed["changed"] = sum(users[each] != own[each] for each in both)
    assert (item["config"], user | changed) == (grown, user)
    names = [found[f"{what}_{how}"] for what in ("tables", "tensors") for how in ("added", "dropped")]
    assert names == [[], ["gone", "other"] if is_copy else [], ["w3"], ["w1"]]
    assert (found["tables"], found["tensors_changed"]) == ({}, ["n", "type"])
    assert main(["diff", shop, f"{shop}@3"]) == 0
    assert capsys.readouterr().out == f"before: {shop}@3\nafter: {shop}@3\n"
    with tierstore.open(tmp_path / "fixed", ddr="8MiB") as store:
        config = tierstore.TableConfig(name="user", num_embeddings=9, embedding_dim=4)
        store.create_table(config).write(torch.arange(3), torch.ones(3, 4))
        store.commit()
    user = diff(shop, str(tmp_path / "fixed"))["tables"]["user"]
    assert (user["added"], user["removed"]) == (3, len(own))
