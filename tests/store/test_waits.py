"""No call waits for something that only its own caller can do: every public call, amid everything that a caller may
have begun and not ended. And what waits for others ends by Ctrl-C."""

import contextlib
import faulthandler
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import tierstore
from tests.gate import Gate
from tierstore.errors import TierstoreError
from tierstore.nn.prefetch import Prefetched
from tierstore.store.commits import PendingCommit
from tierstore.store.optimizer import TieredOptimizer
from tierstore.store.recording import Recorder
from tierstore.store.refresh import Newer

SECONDS: Final = 5.0
ROWS, DIM = 5000, 8
IDS = torch.arange(0, ROWS, 2)
Act = Callable[[], None]


class Scene:
    def __init__(self, folder: Path, kind: str, made: Path | None = None) -> None:
        options: dict[str, Any] = {"ddr": "1MiB", "threads": 1, "keep": 2}
        self.folder, self.count = folder, 0
        if made is not None and kind != "memory":
            shutil.copytree(made, folder / "store")
        where = {"cold": "memory"} if kind == "memory" else {"directory": folder / "store"}
        self.store = writer = tierstore.open(**where, **options)  # type: ignore[arg-type]
        if not writer.tables:
            writer.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
            ids = tierstore.DynamicIds()
            writer.create_table(tierstore.TableConfig(name="d", num_embeddings=4, embedding_dim=DIM, ids=ids))
            writer["t"].write(IDS, torch.ones(len(IDS), DIM))
            writer["d"].admit(torch.arange(4))
            writer.commit()
        self.newer: Newer | None = None
        self.readers: list[tierstore.Store] = []
        if kind == "reader":
            self.store = tierstore.open(folder / "store", mode="r", ddr="1MiB", threads=1)
            self.readers = [writer]
            writer["t"].write(IDS[:9], torch.zeros(9, DIM))
            writer.commit()
            self.newer = self.store.find_newer()
        self.table, self.dynamic = self.store["t"], self.store["d"]
        self.bag = tierstore.TieredEmbeddingBag(self.table)
        self.pending: PendingCommit | None = None

    @cached_property
    def pipeline(self) -> Prefetched[torch.Tensor]:
        return tierstore.prefetch([IDS[:8].view(2, 4)] * 4, self.bag, depth=1)

    @cached_property
    def recorder(self) -> Recorder:
        return self.store.record(self.new("trace.npz"), rate=1.0)

    @cached_property
    def optimizer(self) -> TieredOptimizer:
        return self.store.optimizer()

    def new(self, name: str) -> Path:
        self.count += 1
        return self.folder / f"{self.count}-{name}"

    def train(self, bag: tierstore.TieredEmbeddingBag, ids: torch.Tensor) -> None:
        with torch.enable_grad():  # there are none within a backward pass
            out = bag(ids.view(1, -1)).sum()
            if out.requires_grad:
                out.backward()

    def end(self) -> None:
        self.pipeline.close()
        for each in (self.store, *self.readers):
            each.close()


def _newer(scene: Scene) -> Newer:
    if scene.newer is None:
        raise ValueError("nothing newer")
    return scene.newer


def _pending(scene: Scene) -> PendingCommit:
    if scene.pending is None:
        raise ValueError("no commit")
    return scene.pending


def _step(scene: Scene) -> None:
    optimizer = scene.optimizer
    scene.train(scene.bag, IDS[:30])
    optimizer.step()


def _config() -> tierstore.TableConfig:
    return tierstore.TableConfig(name="new", num_embeddings=50, embedding_dim=DIM)


CALLS: Final[dict[str, Callable[[Scene], object]]] = {
    "Store.stats": lambda scene: scene.store.stats(),
    "Store.tables": lambda scene: [*scene.store.tables],
    "Store.version": lambda scene: scene.store.version,
    "Store.versions": lambda scene: scene.store.versions,
    "Store.extra": lambda scene: scene.store.extra,
    "Store.changed_tables": lambda scene: scene.store.changed_tables,
    "Store.tensors": lambda scene: scene.store.tensors(),
    "Store.commit_id": lambda scene: scene.store.commit_id(1),
    "Store.describe_old_reader": lambda scene: scene.store.describe_old_reader(),
    "Store.set_time": lambda scene: scene.store.set_time(60.0),
    "Store.verify": lambda scene: scene.store.verify(),
    "Store.written_rows": lambda scene: [*scene.store.written_rows(scene.table)],
    "Table.written": lambda scene: [*scene.table.written(), *scene.dynamic.written()],
    "Table.read": lambda scene: scene.table.read(IDS[:40]),
    "Table.read_state": lambda scene: scene.table.read_state(IDS[:40]),
    "Table.rows_in_memory": lambda scene: scene.table.rows_in_memory(IDS[:40].numpy()),
    "Table.are_in_memory": lambda scene: scene.table.are_in_memory(IDS[:40]),
    "Table.first_values": lambda scene: scene.table.first_values(IDS[:40]),
    "Table.pooled": lambda scene: scene.table.pooled(IDS[:4], torch.tensor([0, 2, 4])),
    "Table.write": lambda scene: scene.table.write(IDS, torch.zeros(len(IDS), DIM)),
    "Table.learning_rate": lambda scene: setattr(scene.table, "learning_rate", 0.5),
    "Table.admit": lambda scene: scene.dynamic.admit(torch.arange(70, 72)),
    "Table.evict": lambda scene: scene.dynamic.evict(torch.arange(70, 72)),
    "Table.id_stats": lambda scene: scene.dynamic.id_stats(),
    "TieredEmbeddingBag.forward": lambda scene: scene.train(scene.bag, IDS[:30]),
    "Store.commit_async": lambda scene: setattr(scene, "pending", scene.store.commit_async()),
    "PendingCommit.result": lambda scene: _pending(scene).result(),
    "PendingCommit.exception": lambda scene: _pending(scene).exception(),
    "PendingCommit.cancel": lambda scene: _pending(scene).cancel(),
    "Store.commit": lambda scene: scene.store.commit(),
    "Recorder.describe": lambda scene: scene.recorder.describe(),
    "Recorder.rate": lambda scene: scene.recorder.rate,
    "Store.backup": lambda scene: scene.store.backup(scene.new("backup"), verify=True),
    "Prefetched.send": lambda scene: next(scene.pipeline),
    "Prefetched.state_dict": lambda scene: scene.pipeline.state_dict(),
    "Prefetched.throw": lambda scene: scene.pipeline.throw(KeyError),
    "Table.on_evict": lambda scene: scene.dynamic.on_evict(None),
    "Recorder.stop": lambda scene: scene.recorder.stop(),
    "Store.record": lambda scene: scene.store.record(scene.new("trace.npz")),
    "Newer.tensors": lambda scene: _newer(scene).tensors(),
    "Store.rehearse_newer": lambda scene: scene.store.rehearse_newer(),
    "Store.find_newer": lambda scene: scene.store.find_newer(),
    "Newer.close": lambda scene: _newer(scene).close(),
}
"""Each after the other, amid one holder."""

ENDING: Final[dict[str, tuple[str, Callable[[Scene], object]]]] = {
    "Store.close": ("disk memory reader", lambda scene: scene.store.close()),
    "Store.create_table": ("disk", lambda scene: scene.store.create_table(_config())),
    "Store.change_table": ("disk", lambda scene: scene.store.change_table("t", num_embeddings=ROWS + 1)),
    "Store.drop_table": ("disk memory", lambda scene: scene.store.drop_table("t")),
    "Store.rollback": ("disk memory", lambda scene: scene.store.rollback(1)),
    "Store.refresh": ("reader", lambda scene: scene.store.refresh()),
    "Newer.show": ("reader", lambda scene: _newer(scene).show()),
    "Prefetched.close": ("disk reader", lambda scene: scene.pipeline.close()),
    "Store.optimizer": ("disk", lambda scene: scene.optimizer),
    "TieredOptimizer.step": ("disk", _step),
}
"""Each in a scene of its own, as others may then have nothing left to do."""

BETWEEN_ROOMS: Final = {
    "Store": "find_or_require has_rows_of note_partly_trained pool_of require_whole_steps use_optimizer use_rows",
    "Table": "columns converted follows give_rows go_on_at id_error ids in_pool is_whole jagged keys_of local "
    "lookup name next_hyper note_change pool pooled_directly require_float require_whole restore rounding_seed "
    "size_bytes state",
    "Recorder": "add_table note_bags note_lookups note_rows",
    "Newer": "found manifest rows show_ids version",
    "PendingCommit": "end",
    "Prefetched": "",
    "TieredOptimizer": "add_param_group load_state_dict has_grad collect zero_grad clip_grad_norm_ "
    "of_own_tables param_groups state_dict",
}
"""Public names that users do not call, or that only look at what others above do."""


# What a caller has begun: each calls ``act`` amid it.


def _nothing(_: Scene, act: Act) -> None:
    act()


def _half_listed(scene: Scene, act: Act) -> None:
    parts = [scene.table.written(), scene.store.written_rows(scene.table), scene.dynamic.written()]
    for each in parts:
        next(each, None)
    act()
    for each in parts:
        with contextlib.suppress(TierstoreError):
            list(each)


def _half_used(scene: Scene, act: Act) -> None:
    out = scene.bag(IDS[:64].view(2, -1))
    act()
    del out


def _backward(scene: Scene, act: Act) -> None:
    out = scene.bag(IDS[:64].view(2, -1))
    if out.requires_grad:
        out.register_hook(lambda _: act())
        with contextlib.suppress(RuntimeError, TierstoreError):
            out.sum().backward()


def _prefetch(depth: int) -> Callable[[Scene, Act], None]:
    def hold(scene: Scene, act: Act) -> None:
        with contextlib.suppress(TierstoreError):
            for place, _ in enumerate(tierstore.prefetch([IDS[:8].view(2, 4)] * 4, scene.bag, depth=depth)):
                if place == 1:
                    act()

    return hold


def _within_source(depth: int, *, by_features: bool) -> Callable[[Scene, Act], None]:
    def hold(scene: Scene, act: Act) -> None:
        done: list[bool] = []

        def act_once() -> None:
            if not done:
                done.append(True)
                act()

        def batches() -> Iterator[torch.Tensor]:
            for _ in range(3):
                if not by_features:
                    act_once()
                yield IDS[:8].view(2, 4)

        def features(batch: torch.Tensor) -> torch.Tensor:
            if by_features:
                act_once()
            return batch

        scene.pipeline = tierstore.prefetch(batches(), scene.bag, depth=depth, features=features)
        with contextlib.suppress(TierstoreError, ValueError, RuntimeError):
            list(scene.pipeline)

    return hold


def _progress(call: str) -> Callable[[Scene, Act], None]:
    def hold(scene: Scene, act: Act) -> None:
        called: list[int] = []

        def progress(_done: int, _total: int) -> None:
            if not called:
                called.append(1)
                act()

        with contextlib.suppress(TierstoreError):
            if call == "verify":
                scene.store.verify(progress=progress)
            else:
                scene.store.backup(scene.new("backup"), verify=True, progress=progress)

    return hold


def _on_evict(scene: Scene, act: Act) -> None:
    if scene.store.readonly:
        return
    scene.dynamic.on_evict(lambda _ids, _rows: act())
    with contextlib.suppress(TierstoreError):
        scene.train(tierstore.TieredEmbeddingBag(scene.dynamic), torch.arange(50, 53))


def _callback_of_a_commit(scene: Scene, act: Act) -> None:
    if scene.store.readonly:
        return
    done = threading.Event()
    pending = scene.store.commit_async()
    scene.pending = pending
    pending.add_done_callback(lambda _: (act(), done.set()))
    done.wait()


def _closure(scene: Scene, act: Act) -> None:
    if scene.store.readonly:
        return

    def closure() -> torch.Tensor:
        act()
        scene.optimizer.zero_grad()
        loss = scene.bag(IDS[:8].view(2, 4)).sum()
        loss.backward()
        return loss

    with contextlib.suppress(TierstoreError, RuntimeError):
        scene.optimizer.step(closure)


HOLDERS: Final[dict[str, tuple[str, Callable[[Scene, Act], None]]]] = {
    "nothing": ("disk memory reader", _nothing),
    "half listed": ("disk memory reader", _half_listed),
    "half used": ("disk reader", _half_used),
    "backward": ("disk", _backward),
    "prefetch": ("disk memory reader", _prefetch(2)),
    "plain prefetch": ("disk", _prefetch(0)),
    "source": ("disk reader", _within_source(2, by_features=False)),
    "plain source": ("disk", _within_source(0, by_features=False)),
    "features": ("disk", _within_source(2, by_features=True)),
    "verify": ("disk memory reader", _progress("verify")),
    "backup": ("disk reader", _progress("backup")),
    "on_evict": ("disk memory", _on_evict),
    "callback of a commit": ("disk memory", _callback_of_a_commit),
    "closure": ("disk", _closure),
}


ERRORS = (TierstoreError, ValueError, TypeError, RuntimeError, KeyError, StopIteration, FileExistsError)


class Watch:
    def __init__(self) -> None:
        self.doing = ""
        self.since = 0.0
        self.errors: dict[str, str] = {}

    def note(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()

    def run(self, scene: Scene, holder: str, calls: dict[str, Callable[[Scene], object]]) -> None:
        for name, call in calls.items():
            self.note(f"{name} amid {holder}")
            try:
                call(scene)
            except ERRORS as error:
                self.errors[self.doing] = f"{type(error).__name__}: {error}"
        self.note(f"the end of {holder}")


def _run_all(folder: Path, watch: Watch, made: Path) -> None:
    for holder, (kinds, hold) in HOLDERS.items():
        for kind in kinds.split():
            ending = [name for name, ended in ENDING.items() if kind in ended[0].split()]
            for number, calls in enumerate([CALLS, *({name: ENDING[name][1]} for name in ending)]):
                where = f"{holder} ({kind})"
                watch.note(f"the beginning of {where}")
                path = folder / f"{holder}-{kind}-{number}"
                path.mkdir(parents=True)
                scene = Scene(path, kind, made)
                hold(scene, lambda scene=scene, where=where, calls=calls: watch.run(scene, where, calls))
                watch.note(f"closing after {calls if len(calls) == 1 else ''} amid {where}")
                scene.end()


def test_no_call_waits_for_its_own_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    for kind in ("disk", "memory", "reader"):  # kernels are compiled
        (tmp_path / kind).mkdir()
        scene = Scene(tmp_path / kind, kind)
        if kind == "disk":
            scene.store.backup(made)
        Watch().run(scene, "", CALLS | {name: call for name, (_, call) in ENDING.items()})
        scene.end()
    watch, failed = Watch(), list[BaseException]()

    def run() -> None:
        try:
            _run_all(tmp_path, watch, made)
        except BaseException as error:
            failed.append(error)

    watch.note("the beginning")
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if time.monotonic() - watch.since > SECONDS:
            faulthandler.dump_traceback(sys.__stderr__)
            pytest.fail(f"{watch.doing} takes more than {SECONDS:g} s")
    if failed:
        raise failed[0]


def test_every_public_call_is_in_the_table() -> None:
    listed = {*CALLS, *ENDING}
    for kind in (tierstore.Store, tierstore.Table, Recorder, Newer, PendingCommit, Prefetched, TieredOptimizer):
        own = {
            name
            for base in kind.__mro__
            if base.__module__.startswith("tierstore.")
            for name in vars(base)
            if not name.startswith("_")
        }
        known = {name.partition(".")[2] for name in listed if name.startswith(f"{kind.__name__}.")}
        known |= set(BETWEEN_ROOMS[kind.__name__].split())
        assert own == known, f"of {kind.__name__}, CALLS or ENDING lacks {own - known}, and has too many {known - own}"


def test_locks_can_be_taken_again_by_the_thread_that_has_them() -> None:
    """A signal's handler, or a callback, uses the store in a thread that may be amid any call."""
    package = Path(tierstore.__file__).parent
    rooms = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "serve"]
    assert [
        str(path) for path in rooms if re.search(r"threading\.(Lock|Condition|Semaphore)\(\)", path.read_text())
    ] == [
        str(package / "kernels" / "threads.py")  # which runs nobody else's code under it
    ]


def _interrupted(call: Callable[[], object]) -> None:
    """Ctrl-C ends it, though what it waits for does not come."""
    faulthandler.dump_traceback_later(60, exit=True)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    faulthandler.cancel_dump_traceback_later()


def test_ctrl_c_while_close_waits_for_a_backup(tmp_path: Path) -> None:
    goes_on, begun = threading.Event(), threading.Event()
    scene = Scene(tmp_path, "disk")

    def progress(_done: int, _total: int) -> None:
        begun.set()
        goes_on.wait(30)

    thread = threading.Thread(target=scene.store.backup, args=[tmp_path / "b"], kwargs={"progress": progress})
    thread.start()
    assert begun.wait(10)
    _interrupted(scene.store.close)
    assert scene.store.commit() == 2, "the store goes on"
    goes_on.set()
    scene.end()
    thread.join()
    assert tierstore.open(tmp_path / "b", mode="r", ddr="1MiB").version == 1


@pytest.mark.parametrize("name", ["commit", "close", "rollback"])
def test_ctrl_c_while_a_commit_is_written(tmp_path: Path, gate: Gate, name: str) -> None:
    scene = Scene(tmp_path, "disk")
    scene.table.write(IDS, torch.zeros(len(IDS), DIM))
    gate.close("commit: frozen rows written")
    if name != "commit":
        scene.store.commit_async()
    _interrupted({"commit": scene.store.commit, "close": scene.store.close}.get(name, lambda: scene.store.rollback(1)))
    gate.open()
    assert scene.store.commit() == 3
    scene.end()
