"""Run files: what is read, what is refused, and what the errors say."""

import dataclasses
import math
from typing import get_type_hints

import pytest

from tierstore.settings.sections import to_toml
from tierstore.train import config as run_files
from tierstore.train.config import ConfigError, RunConfig, parse_override


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write_file


def load(path, *overrides):
    return run_files.load(path, [parse_override(text) for text in overrides])


def test_keys_reach_their_fields_and_overrides_win(write):
    assert load(write("")) == RunConfig()
    text = "[store]\nddr = 1024\n[optimizer]\nsparse_lr = 1\n[model]\ntop_mlp = [8, 4]\n"
    config = load(write(text + '[data]\nsparse_columns = ["a", "b"]\n[embedding]\nnum_embeddings = [5, 6]\n'))
    assert (config.store.ddr, config.model.top_mlp, config.table_sizes) == (1024, (8, 4), (5, 6))
    assert (config.optimizer.sparse_lr, type(config.optimizer.sparse_lr)) == (1.0, float)
    path = write("[embedding]\nnum_embeddings = 7\ninit_range = 1e-05\n[train]\nbatch_size = 64\n")
    config = load(path, "train.batch_size=1", "store.ddr=5% of tables", "data.log_dense=false", "train.batch_size=256")
    assert (config.train.batch_size, config.store.ddr, config.data.log_dense) == (256, "5% of tables", False)
    assert config.table_sizes == (7,) * 26
    assert load(path, 'store.path="a=b"').store.path == "a=b"
    for with_help in (False, True):
        assert load(write(to_toml(config, with_help=with_help))) == config


OF_KINDS = {int: [True, "x", 1.5], float: [True, "x", math.nan], bool: ["yes", 1], str: [5, True]}
FIELDS = [(name, each) for name, section in get_type_hints(RunConfig).items() for each in dataclasses.fields(section)]


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=lambda part: getattr(part, "name", part))
def test_values_that_a_key_cannot_have_are_named_with_their_origin(write, section, field):
    kind = get_type_hints(get_type_hints(RunConfig)[section])[field.name]
    wrong, name = list(OF_KINDS.get(kind, [1.5])), field.name.rstrip("_")
    if field.metadata.get("low") is not None:
        wrong += [field.metadata["low"] - 1, 2 * field.metadata["high"] + 1]
    for value in wrong:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        with pytest.raises(ConfigError, match=rf"run\.toml: .*{section}\.{name}"):
            load(write(f"[{section}]\n{name} = {text}\n"))
        if kind is not str:  # which a bare word gives, too
            with pytest.raises(ConfigError, match=rf"--set .*{section}\.{name}"):
                load(write(""), f"{section}.{name}={text}")


NOT_HESSIAN_FREE = ("dense_clip_norm = 1.0", "dense_weight_decay = 0.1", '[model]\ntowers = [["C1"]]')


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[train]\nbatchsize = 1", [], r'unknown key "batchsize" in \[train\]; did you mean \'batch_size\'\?'),
        ("[trian]\nseed = 1\n", [], r"unknown section \[trian\]; did you mean \'train\'\?"),
        ("[train]\nsparse_lr = 1\n", [], r"unknown key \"sparse_lr\" in \[train\]; it belongs to \[optimizer\]"),
        ("seed = 1\n", [], "'seed' stands outside a section"),
        ('[model]\ninteraction = "cat"\n', [], r'model\.interaction = \'cat\': expected "dot" or "dcn"'),
        ("[model]\ntop_mlp = [64, 0]\n", [], r"model\.top_mlp"),
        ("[embedding]\nnum_embeddings = [1, 2]\n", [], r"embedding\.num_embeddings lists 2 tables"),
        ("[train\n", [], r"run\.toml is not valid TOML"),
        *((f'[optimizer]\ndense = "hessian-free"\n{key}', [], r"optimizer\.dense") for key in NOT_HESSIAN_FREE),
        ("[optimizer]\ncurvature_share = 0.0\n", [], r"optimizer\.curvature_share"),
        ("[embedding.tables.C27]\ndim = 8\n", [], r"embedding\.tables\.C27: did you mean 'C"),
        ("[embedding.tables.C2]\ndim = 8\n", [], r"embedding\.tables\.C2\.dim = 8: expected embedding\.dim"),
        ("", ["embedding.tables.C2.dims=8"], r'--set .*: embedding\.tables\.C2: unknown key "dims"'),
        ("[data]\nshuffle_rows = 100\n", [], r"data\.shuffle_rows = 100: expected a multiple of train\.batch_size"),
        ("[train]\npatience = 1\n", [], r"train\.patience or keep_best = 1: expected none without test rows"),
        ("[data]\nlabel_weights = [2.0]\n", [], r"data\.label_weights = .*for each of several labels"),
        ('[optimizer]\ndecay = "linear"\n', [], r"optimizer\.decay_steps = 0: expected 1 or more"),
        ("", ["train.batchsize=1"], r'--set train\.batchsize=1: unknown key "batchsize"'),
        ("", ["train.batch_size"], r"expected section\.key=value"),
    ],
)
def test_errors_name_the_origin_the_key_and_the_way_out(write, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(write(text), *overrides)


def test_hostile_files_end_in_a_short_error(write):
    for text, message in (
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a." * 50_000 + "a = 1", "line 1 has more than 200 dots"),
        ("#" * (2**18 + 1), "has more than 262144 bytes"),
        ("[train]\nbatch_size = " + "9" * 400, "expected a whole number from 1"),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            load(write(text))
        assert len(str(raised.value)) < 1000


def test_every_field_has_help():
    assert [name for name, field in FIELDS if not field.metadata["help"]] == []
