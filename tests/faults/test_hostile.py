"""What systems, people and directories that mean harm do to a store: each ends in the right rows or in an error.

Nothing in a directory is run, nothing outside it is touched, no size in it is believed."""

import ast
import gzip
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from bench.data import ROOT
from tests.children import make_store, run
from tests.store.test_manifest import forge
from tierstore import errors
from tierstore.store.manifest import MANIFEST_NAME

from .test_file_systems import mounted

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


def test_a_read_only_file_system_is_read_and_not_written_to(tmp_path: Path) -> None:
    with mounted(tmp_path / "mounted", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as folder:
        make_store(folder / "store")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with tierstore.open(folder / "store", mode="r", ddr="2MiB", threads=1) as reader:
            reader.verify()
            assert (reader["t"].read(torch.arange(2000)) == 3.0).all()
        for name in ("store", "new"):
            with pytest.raises(errors.TierstoreError, match=rf"{name}.*read-only; open the store with mode=\"r\""):
                tierstore.open(folder / name, ddr="2MiB")
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        with tierstore.open(folder / "store", ddr="2MiB") as store:
            assert store.commit() == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_that_lacks_a_permission() -> None:
    """In a folder of its own: that of pytest may not be looked into by others."""
    code = """
    def use(folder, mode):
        with tierstore.open(folder, mode=mode, ddr="2MiB", threads=1) as store:
            return bool((store["t"].read(torch.arange(2000)) == 3.0).all())

    def use_as_nobody(folder, mode):
        os.setgid(65534)
        os.setuid(65534)
        return use(folder, mode)

    store = Path(sys.argv[1])
    for mode in ("r", "w"):
        use(store, mode)  # loads the kernels, which others may not read
    for folder, mode in ((store, "r"), (store, "w"), (store.with_name("new"), "w")):
        forked(use_as_nobody, folder, mode)
    (store / "rows.lmdb").chmod(0o600)
    forked(use_as_nobody, store, "r")
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        store = Path(folder, "store")
        make_store(store)
        read, *refused = run(code, store).splitlines()
    assert read == "ok True"
    for said, folder in zip(refused, (store, store.with_name("new"), store), strict=True):
        assert said.startswith(f"TierstoreError {folder}")
        assert "ermission" in said
    assert all("this user lacks the permission" in said for said in refused[:2])


@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_store_stays_whole_without_file_descriptors_and_says_what_to_raise(store: Path, mode: str) -> None:
    """As the limit on descriptors rises by one until all works."""
    code = """
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    ids = torch.arange(2000)

    def use():
        # As little memory as there may be, so that rows are written back between commits.
        with tierstore.open(folder, mode=mode, ddr="640KiB", threads=2) as store:
            if mode == "w":
                store["t"].write(ids, torch.full((2000, 16), float(store.version + 3)))
                store.commit(extra={"step": store.version + 1}, tensors={"w": torch.ones(3)})
            store.verify()

    def state():
        with tierstore.open(folder, mode="r", ddr="2MiB", threads=1) as store:
            values = store["t"].read(ids).unique().tolist()
            assert values == [store.version + 2], (values, store.version)
            return store.version

    use()
    version = state()
    used = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in range(used - 1, used + 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            use()
            refusal = None
        except (errors.TierstoreError, OSError) as caught:
            refusal = caught
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        before, version = version, state()
        if refusal is None:
            break
        assert version in (before, before + 1)
        print(type(refusal).__name__, str(refusal).replace("\\n", " "))
    assert refusal is None
    assert len(os.listdir("/proc/self/fd")) <= used, "descriptors leak"
    """
    said = run(code, store, mode).splitlines()
    assert len(said) >= 2
    assert [line for line in said if "raise `ulimit -n`" not in line or str(store) not in line] == []


def test_no_source_asks_for_the_time_of_day() -> None:
    """Waits and rates go by clocks that never jump. The server's log says when a line was written, its statistics when
    a model was asked last, and a version when it was committed. When events happened is the world's time."""
    words = ("time.time(", "time_ns(", "datetime", "time import time", "CLOCK_REALTIME", "gettimeofday", "utcnow")
    loaded_early, length_of_time = "import datetime  # noqa: F401", "from datetime import timedelta\n"
    allowed = ("time.monotonic_ns(", loaded_early, length_of_time)
    told = (
        "serve/logs.py", "serve/metrics.py", "serve/engine.py", "store/version.py", "offline/inspection.py",
        "train/readers/following.py", "train/summary.py", "cli/entry.py",
    )  # fmt: skip
    tells_time = {ROOT / "tierstore" / name for name in told}
    for path in sorted({*(ROOT / "tierstore").rglob("*.py")} - tells_time):
        text = path.read_text()
        for word in allowed:
            text = text.replace(word, "")
        assert not [word for word in words if word in text], path
