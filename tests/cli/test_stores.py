"""inspect, verify, repair, rollback and compact."""

import tierstore
from tierstore.cli import entry as cli


def test_inspect_says_what_a_store_holds(store_with_rows, capsys):
    assert cli.main(["inspect", str(store_with_rows)]) == 0
    output = capsys.readouterr().out
    assert f"{store_with_rows}: version 1, 1 table\n" in output
    assert "item  1,000 x 8 float32, sgd, 31.2 KiB if all in memory" in output
    assert "manifest.json" in output
    assert "1 tensor, 24 B" in output
    assert '{"note": "hello"}' in output


def damage(store, step):
    """Change rows of ones; the row file."""
    (path,) = store.glob("*.lmdb")
    data = bytearray(path.read_bytes())
    place = data.find(b"\x00\x00\x80\x3f" * 8)
    assert place > 0
    while place >= 0:
        data[place] ^= 1
        place = data.find(b"\x00\x00\x80\x3f" * 8, place + step)
    path.write_bytes(data)
    return path


def test_verify_finds_damage_and_repair_saves_what_is_sound(store_with_rows, tmp_path, capsys):
    store = str(store_with_rows)
    assert cli.main(["verify", store]) == 0
    assert "version 1 is sound: 10 rows in 1 segment of 1 table, " in capsys.readouterr().out
    assert cli.main(["repair", store, str(tmp_path / "whole")]) == 0
    assert "version 1, 10 rows saved and verified; nothing was lost" in capsys.readouterr().out
    path = damage(store_with_rows, 32)
    assert cli.main(["verify", store]) == 1
    assert str(path) in capsys.readouterr().err
    assert cli.main(["repair", store, str(tmp_path / "part")]) == 1
    said = capsys.readouterr().out
    assert f"all listed in {tmp_path / 'part' / 'lost.txt'}" in said
    assert "table 'item': rows 0 to " in said
    with tierstore.open(tmp_path / "part", mode="r", ddr="1MiB") as opened:
        assert opened.extra == {"note": "hello"}


def test_a_store_without_a_commit_says_so_and_long_extra_is_cut(store_dir, capsys):
    with tierstore.open(store_dir, mode="w", ddr="8MiB") as store:
        store.create_table(tierstore.TableConfig(name="item", num_embeddings=1000, embedding_dim=8))
    for command in ("inspect", "verify"):
        assert cli.main([command, str(store_dir)]) == 0
        assert "nothing committed yet" in capsys.readouterr().out
    with tierstore.open(store_dir, mode="w", ddr="8MiB") as store:
        store.commit(extra={"note": "x" * 1000})
    assert cli.main(["inspect", str(store_dir)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 210


def test_rollback_of_the_command_line(tmp_path, capsys):
    with tierstore.open(tmp_path / "shop", keep=3) as store:
        for number in range(4):
            store.commit(extra={"n": number})
    assert cli.main(["inspect", str(tmp_path / "shop")]) == 0
    assert "version 4 (kept too: 2, 3)" in capsys.readouterr().out
    assert cli.main(["rollback", str(tmp_path / "shop"), "1"]) == 2
    assert "is not kept; kept: 2, 3, 4." in capsys.readouterr().err
    assert cli.main(["rollback", str(tmp_path / "shop"), "2"]) == 0
    assert "version 2 is the current one" in capsys.readouterr().out
    with tierstore.open(tmp_path / "shop", mode="r") as store:
        assert (store.versions, store.extra) == ((2,), {"n": 1})


def test_compact_says_what_it_saved(store_with_rows, tmp_path, capsys):
    copy = tmp_path / "compact"
    assert cli.main(["compact", str(store_with_rows), str(copy)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{copy}: version 1, 10 rows in 1 segment, verified; ")
    assert said.endswith(" after\n")
    assert cli.main(["compact", str(store_with_rows), str(copy)]) == 1
    assert "is not empty" in capsys.readouterr().err
