"""train and demo: flags and the keys of a run file."""

import json
from pathlib import Path

import pytest

from tests.plan.hosts import shop_workload
from tierstore.cli import entry as cli
from tierstore.plan.presets import workload_toml
from tierstore.settings.sections import to_dict
from tierstore.train import RunConfig
from tierstore.train.config import load


def test_flags_stand_for_keys_and_keys_is_a_run_file_of_all_defaults(capsys, tmp_path):
    known = to_dict(RunConfig())
    for name, *_ in cli._TRAIN_FLAGS.values():
        section, _, key = name.partition(".")
        assert key in known[section]
    assert cli.main(["train", "--keys"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out)
    assert load(path) == RunConfig()


def overrides(*arguments):
    options = cli.build_parser().parse_args(["train", "run.toml", *arguments])
    return [(section, key, value) for section, key, value, _ in cli._overrides(options)]


def test_flags_become_overrides_and_win_over_set():
    assert overrides("--epochs", "3", "--set", "train.epochs=2", "--ddr", "1024", "--data", "7") == [
        ("train", "epochs", 2),
        ("data", "path", "7"),
        ("store", "ddr", "1024"),
        ("train", "epochs", 3),
    ]
    assert overrides("--prefetch-depth", "0") == [("train", "prefetch_depth", 0)]


def test_a_wrong_flag_is_named_with_its_key(tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    assert cli.main(["train", str(run_file), "--epochs", "0"]) == 2
    expected = f"expected a whole number from 1 to {2**63 - 1:,}"
    assert capsys.readouterr().err == f"tierstore: --epochs 0: train.epochs=0: {expected}\n"


# Traces: drawn, described, recorded; what is read is not written over.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.toml").write_text(workload_toml(shop_workload()))
    return tmp_path


def test_traces_are_drawn_and_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "shop.toml", "shop.npz", "--samples", "500", "--scale", "0.1"]
    assert cli.main(["trace", *words]) == 0
    assert capsys.readouterr().out == "shop.npz: 4,000 lookups of 2 tables in 500 samples\n"
    assert cli.main(["trace", *words]) == 1
    assert "--force" in capsys.readouterr().err
    assert cli.main(["trace", *words, "--force"]) == 0
    assert cli.main(["trace", "describe", "shop.npz", "--json", "found.json"]) == 0
    assert "4,000 accesses of " in capsys.readouterr().out
    assert json.loads((folder / "found.json").read_text())["batches"] == 2


def test_what_cannot_be_changes_nothing(folder: Path) -> None:
    before = (folder / "shop.toml").read_bytes()
    for words, status in {
        "generate shop.toml shop.toml --samples 5 --force": 1,
        "generate shop.toml x.npz --samples 0": 2,
        "describe shop.toml --json shop.toml --force": 1,
        "describe shop.toml": 2,
        "describe no.npz": 1,
        "x": 2,
    }.items():
        assert cli.main(["trace", *words.split()]) == status
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"shop.toml": before}
