"""A directory that means harm: nothing in it is run, nothing outside it is touched, no size in it is believed."""

import ast
import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tierstore
from bench.data import ROOT
from tests.children import make_store, run
from tests.store.test_manifest import forge
from tierstore import errors
from tierstore.store.manifest import MANIFEST_NAME

FORBIDDEN_MODULES = {
    "cloudpickle", "code", "dill", "importlib", "joblib", "marshal", "runpy", "shelve", "yaml",
}  # fmt: skip
PICKLE_WRITES = {"pickle.Pickler", "pickle.dump", "pickle.dumps", "pickle.PickleError", "pickle.UnpicklingError"}
"""Of a module that reads and writes, what does not read."""
FORBIDDEN_NAMES = {"__import__", "compile", "eval", "exec"}
KNOWN = {
    "tierstore/__init__.py": ["importlib"],
    "tierstore/cli/entry.py": ["importlib"],
    "tierstore/dist/ranks.py": ["loads"],
    "tierstore/system/__init__.py": ["importlib"],
    "tierstore/train/build.py": ["importlib"],
    "tierstore/warm_up/ahead.py": ["importlib", "load"],
}
"""``__init__``, ``entry`` and ``system`` import modules of this package, ``build`` what the user's own run file names
as its model's class or callbacks, and nothing that a store names. ``ranks``
loads what ranks of its own process group sent, as torch's ``all_gather_object`` does; no file. ``ahead`` what it wrote
itself, into a pipe: names of kernels of this package, and types."""
SOURCES = sorted((ROOT / "tierstore").rglob("*.py"))


def _offences(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found += [node.module] if node.module.split(".")[0] in FORBIDDEN_MODULES | {"pickle"} else []
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            found += [node.attr] if ast.unparse(node) not in PICKLE_WRITES else []
        elif isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            name = ast.unparse(node.func)
            unsafe_numpy = name in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False"
            unsafe_torch = name == "torch.load" and keywords.get("weights_only") != "True"
            if name in FORBIDDEN_NAMES or unsafe_numpy or unsafe_torch:
                found.append(name)
    return found


def test_no_source_can_run_what_a_file_holds() -> None:
    found = {str(path.relative_to(ROOT)): _offences(ast.parse(path.read_text())) for path in SOURCES}
    assert {path: offences for path, offences in found.items() if offences} == KNOWN


def table(**changes: Any) -> dict[str, Any]:
    return tierstore.TableConfig(name="t", num_embeddings=2000, embedding_dim=16).to_dict() | changes


def test_a_manifest_that_claims_too_much_ends_in_an_error_and_little_memory(tmp_path: Path) -> None:
    vast, many = {"num_embeddings": 2**40}, {"num_embeddings": 1, "embedding_dim": 4}
    refused, unknown = "BudgetError the system refuses", "FormatError {path} describes what this release does not know"
    claims = {
        "vast tables": ([table()] + [table(name=f"t{i}", **vast) for i in range(3000)], refused),
        "one vast table": ([table(**vast)], f"{refused} 4.0 TiB"),
        "wide rows": ([table(embedding_dim=1 << 20)], unknown),
        "many tables": (
            [table()] + [table(name=f"t{i}", **many) for i in range(300)], "ok (301, torch.Size([3, 16]))"
        ),
    }  # fmt: skip
    expected = []
    for claim, (tables, message) in claims.items():
        make_store(tmp_path / claim)
        forge(tmp_path / claim / MANIFEST_NAME, tables=tables)
        expected += [message.format(path=tmp_path / claim / MANIFEST_NAME)] * 2
    code = """
    def use(folder, mode):
        limit_data(512 << 20)
        with tierstore.open(folder, mode=mode, ddr="8MiB", threads=1) as store:
            return len(store.tables), store["t"].read(torch.arange(3)).shape

    for folder in sys.argv[1:]:
        for mode in ("r", "w"):
            forked(use, folder, mode)
    """
    lines = run(code, *(tmp_path / claim for claim in claims)).splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_json_of_any_size_ends_in_an_error_and_bounded_memory(tmp_path: Path) -> None:
    size = 16 * 2**20
    texts = {"nested": b"[", "numbers": b"[" + b"9," * 3_999_999, "string": b'"' + b"x" * size, "objects": b"[{},"}
    for name, unit in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST_NAME).write_bytes((unit * (size // len(unit) + 1))[:size])
        (tmp_path / name / "rows.lmdb").touch()
    code = """
    def use(folder):
        limit_data(768 << 20)
        tierstore.open(folder, mode="r")

    for folder in sys.argv[1:]:
        forked(use, folder)
    """
    lines = run(code, *(tmp_path / name for name in texts)).splitlines()
    for line, name in zip(lines, texts, strict=True):
        assert line.startswith(f"ChecksumError {tmp_path / name / MANIFEST_NAME} is not a complete manifest")


def test_a_sparse_manifest_of_a_gigabyte_is_not_read(store: Path) -> None:
    os.truncate(store / MANIFEST_NAME, 1 << 40)
    with pytest.raises(errors.FormatError, match=r"manifest\.json has 1099511627776 bytes and may have"):
        tierstore.open(store, mode="r")


def _replace(path: Path, kind: str, target: Path) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": target, "dangling link": target.with_name("nowhere"), "device": "/dev/zero"}[kind])


@pytest.mark.parametrize("name", [MANIFEST_NAME, "rows.lmdb", "rows.lmdb-lock", "rows.anchor"])
def test_what_is_no_plain_file_is_refused(store: Path, tmp_path: Path, name: str) -> None:
    before = (store / name).read_bytes()
    for kind in ("link", "dangling link", "pipe", "folder", "device"):
        copy, outside = Path(shutil.copytree(store, tmp_path / kind)), tmp_path / f"outside {kind}"
        outside.write_bytes(before)
        _replace(copy / name, kind, outside)
        told = rf"{name} is a .*, not a plain file|holds rows\.lmdb but no {name}"
        for mode in ("r", "w"):
            with pytest.raises(errors.TierstoreError, match=told):
                tierstore.open(copy, mode=mode, ddr="2MiB")  # type: ignore[arg-type]
        assert outside.read_bytes() == before
        assert not outside.with_name("nowhere").exists()


def test_a_hostile_lock_file_is_made_anew(store: Path) -> None:
    code = """
    def use(path, content, mode):
        path.write_bytes(content)
        with tierstore.open(path.parent, mode=mode, ddr="2MiB", threads=1) as store:
            return bool((store["t"].read(torch.arange(2000)) == 3.0).all())

    path = Path(sys.argv[1]) / "rows.lmdb-lock"
    size = path.stat().st_size
    noise = np.random.default_rng(0).bytes(size)
    for content in (bytes(size), b"\\xff" * size, noise, path.read_bytes()[:64] + noise[64:], noise[:100], noise * 20):
        for mode in ("r", "w"):
            forked(use, path, content, mode)
    """
    assert run(code, store).splitlines() == ["ok True"] * 12


def test_a_compressed_bomb_streams_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "row").write_bytes(b"\t".join([b"1"] * 14 + [b"f00"] * 26) + b"\n")
    for name, unit in (("lines", b"\n"), ("digits", b"0")):
        (tmp_path / name).write_bytes(gzip.compress(unit * (10 << 20)) * 5)
    code = """
    from tierstore.train.readers import CriteoReader

    def use(path, start):
        limit_data(64 << 20)
        return len(list(CriteoReader(path).read_chunks(start, None, 100)))

    list(CriteoReader(sys.argv[1]).read_chunks(0, None, 1))  # compiles
    for path in sys.argv[2:]:
        for start in (0, 1 << 40):
            forked(use, path, start)
    """
    lines = run(code, tmp_path / "row", tmp_path / "lines", tmp_path / "digits").splitlines()
    assert lines[0].startswith(f"DataError {tmp_path / 'lines'}, line 1: 1 tab-separated columns")
    assert lines[1] == "ok 0"
    assert len(lines) == 4
    assert all(line.startswith(f"DataError {tmp_path / 'digits'}, line 1: longer than 1048576") for line in lines[2:])
