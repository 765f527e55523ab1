"""train and demo: flags and the keys of a run file."""

from tierstore.cli import entry as cli
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
    assert overrides("--device", "cuda:1", "--hbm", "5% of tables") == [
        ("store", "hbm", "5% of tables"),
        ("store", "device", "cuda:1"),
    ]


def test_a_wrong_flag_is_named_with_its_key(tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    assert cli.main(["train", str(run_file), "--epochs", "0"]) == 2
    expected = f"expected a whole number from 1 to {2**63 - 1:,}"
    assert capsys.readouterr().err == f"tierstore: --epochs 0: train.epochs=0: {expected}\n"
