"""What notebooks and shells show: short reprs, tables in HTML, lengths, and names that users type."""

import re

import pytest
import torch

import tierstore
from tierstore.store.table import OF_MODULES


def test_stores_and_what_they_give_are_shown_as_tables_and_names_are_those_of_users() -> None:
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="<a&b>", num_embeddings=2000, embedding_dim=2))
        table.read(torch.arange(3))
        shown = store, store.stats(), tierstore.KeyedTensor(["user"], [4], torch.ones(3, 4))
        cells = [" ".join(re.findall("<t[dh]>(.*?)</t[dh]>", each._repr_html_())) for each in shown]
        assert cells[0] == "table rows columns dtype optimizer &lt;a&amp;b&gt; 2,000 2 float32 sgd"
        assert cells[1].split() == repr(shown[1]).split() == str(shown[1]).split()
        assert cells[2] == "feature user columns 4 samples 3"
        assert {"commit", "create_table", "tables", "versions", "_repr_html_"} < {*dir(store)}
        assert {"config", "ids", "read", "write"} < {*dir(table)}
        assert not {*dir(store), *dir(table)} & OF_MODULES
        assert {*object.__dir__(store), *object.__dir__(table)} > OF_MODULES, "all that are hidden are there"


@pytest.mark.parametrize("depth", [0, 2, "auto"])
def test_a_pass_has_the_length_of_its_source(depth: int) -> None:
    batches = [torch.arange(6).reshape(2, 3)] * 5
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        config = tierstore.TableConfig(name="item", num_embeddings=9, embedding_dim=2)
        known, unknown = (
            tierstore.prefetch(each, tierstore.TieredEmbeddingBag(store.create_table(config)), depth=depth)
            for each in (batches, iter(batches))
        )
        assert (len(known), bool(known), bool(unknown), len([*known])) == (5, True, True, 5)
        with pytest.raises(TypeError, match="has no len"):
            len(unknown)
