"""What notebooks and shells show: short reprs, tables in HTML, lengths, and names that users type."""

import html
import re
from pathlib import Path

import pytest
import torch

import tierstore
from bench.data import ROOT


def cells(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall("<t[dh]>(.*?)</t[dh]>", text)]


def test_what_is_shown_is_short_and_names_are_those_of_the_docs() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *Path(ROOT / "docs").glob("*.md")])
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="<a&b>", num_embeddings=2000, embedding_dim=2))
        table.read(torch.arange(3))
        assert cells(store._repr_html_())[:9] == [
            "table", "rows", "columns", "dtype", "optimizer", "<a&b>", "2,000", "2", "float32",
        ]  # fmt: skip
        assert repr(store.stats()) == str(store.stats())
        assert repr(store.stats()).splitlines()[1].split() == ["lookups", "0", "3", "3"] == cells(
            store.stats()._repr_html_()
        )[4:8]  # fmt: skip
        pooled = tierstore.KeyedTensor(["user"], [4], torch.ones(3, 4))
        assert cells(pooled._repr_html_()) == ["feature", "user", "columns", "4", "samples", "3"]
        for shown, least in ((store, 20), (table, 12)):
            names = {name for name in dir(shown) if not name.startswith("_")}
            assert all(hasattr(shown, name) for name in names)
            assert len({name for name in names if re.search(rf"\b{name}\b", pages)}) > least
            assert not names & {"pool_of", "require_open", "keys_of", "note_change"}


@pytest.mark.parametrize("depth", [0, 2, "auto"])
def test_a_pass_has_the_length_of_its_source(depth: int) -> None:
    batches = [torch.arange(6).reshape(2, 3)] * 5
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        config = tierstore.TableConfig(name="item", num_embeddings=9, embedding_dim=2)
        bag = tierstore.TieredEmbeddingBag(store.create_table(config))
        known = tierstore.prefetch(batches, bag, depth=depth)
        assert (len(known), bool(known), len([*known])) == (5, True, 5)
        unknown = tierstore.prefetch(iter(batches), bag, depth=depth)
        assert unknown
        with pytest.raises(TypeError, match="has no len"):
            len(unknown)
        assert len([*unknown]) == 5
