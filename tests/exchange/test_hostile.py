"""Files that mean harm, or are no such files: a clear error, no code run, no store made."""

import os
import pickle
import zipfile

import pytest
import safetensors.torch
import torch

from tierstore import errors
from tierstore.exchange import export_store, import_files

from .support import config, contents, earlier_checkpoint, make_store

KEY = "embedding_bags.item.weight"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exports")
    store = make_store(directory / "store", config(rows=40, dim=3))
    export_store(store, directory / "safetensors")
    earlier_checkpoint(directory / "safetensors").rename(directory / "torch")
    return directory


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_checkpoint_does_not_run(tmp_path, legacy):
    ran = tmp_path / "ran"
    torch.save({KEY: torch.ones(2, 2), "x": Evil(ran)}, tmp_path / "file", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(errors.FormatError, match="file"):
        import_files(tmp_path / "store", [tmp_path / "file"])
    (tmp_path / "bare").write_bytes(pickle.dumps(Evil(ran), protocol=4))
    with pytest.raises(errors.FormatError, match="bare"):
        import_files(tmp_path / "store", [tmp_path / "bare"])
    assert not ran.exists()
    assert not (tmp_path / "store").exists()


def test_a_tensor_larger_than_its_file_is_no_table(tmp_path):
    torch.save({KEY: torch.ones(1, 1).expand(2**36, 4)}, tmp_path / "file")
    with pytest.raises(ValueError, match="stored row by row; it is no table"):
        import_files(tmp_path / "store", [tmp_path / "file"])
    torch.save({KEY: torch.ones(4, 4).to_sparse()}, tmp_path / "file")
    with pytest.raises(ValueError, match="it is no table"):
        import_files(tmp_path / "store", [tmp_path / "file"])
    assert not (tmp_path / "store").exists()


def test_what_is_no_such_file_is_said(tmp_path):
    zips = [b"PK\x03\x04", b"PK\x03\x04" + bytes(500)]
    for content in (*zips, b"", b"x", bytes(100), b"\xff" * 100, b"{}", b"\x80\x02}."):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(errors.FormatError, match="file"):
            import_files(tmp_path / "store", [tmp_path / "file"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.FormatError, match="is no plain file"):
        import_files(tmp_path / "store", [tmp_path / "pipe"])
    with pytest.raises(FileNotFoundError, match="nosuch: no such file; give a safetensors file"):
        import_files(tmp_path / "store", [tmp_path / "nosuch"])
    with pytest.raises(IsADirectoryError, match="is a directory; give a safetensors file"):
        import_files(tmp_path / "store", [tmp_path])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_file_cut_short_is_refused_and_one_with_flipped_bytes_is_or_gives_a_table(tmp_path, exports, form):
    """No reader looks at checksums of these formats: a flip may give other rows, but no crash and no odd error."""
    data, refused = bytearray((exports / form).read_bytes()), 0
    for at in range(0, len(data), 131):
        (tmp_path / "file").write_bytes(data[:at])
        with pytest.raises(errors.FormatError, match="file"):
            import_files(tmp_path / "store", [tmp_path / "file"])
        data[at] ^= 0x11
        (tmp_path / "file").write_bytes(data)
        data[at] ^= 0x11
        try:
            import_files(tmp_path / f"store{at}", [tmp_path / "file"])
        except (errors.TierstoreError, ValueError):
            refused += 1
        else:
            assert len(contents(tmp_path / f"store{at}")) == 1
    assert refused
    assert not (tmp_path / "store").exists()


def test_an_entry_of_ours_that_would_swell_is_refused(tmp_path, exports):
    with zipfile.ZipFile(exports / "torch") as old, zipfile.ZipFile(tmp_path / "file", "w") as new:
        for name in set(old.namelist()) - {"archive/tierstore.json"}:
            new.writestr(name, old.read(name))
        new.writestr("archive/tierstore.json", b" " * 10_000_000, zipfile.ZIP_DEFLATED)
    with pytest.raises(errors.FormatError, match="cannot be read"):
        import_files(tmp_path / "store", [tmp_path / "file"])


def test_names_in_files_cannot_flood_or_steer_the_terminal(tmp_path):
    names = {f"\x1b[2J{number}" + "n" * 5000: torch.ones(1, 1) for number in range(200)}
    safetensors.torch.save_file(names, tmp_path / "file")
    with pytest.raises(ValueError, match="there are ") as caught:
        import_files(tmp_path / "store", [tmp_path / "file"])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 10_000
    safetensors.torch.save_file({"\x1b" + "n" * 5000: torch.ones(3)}, tmp_path / "file")
    with pytest.raises(ValueError, match="has shape") as caught:
        import_files(tmp_path / "store", [tmp_path / "file"], mapping={"\x1b" + "n" * 5000: "t"})
    assert "\x1b" not in str(caught.value)
