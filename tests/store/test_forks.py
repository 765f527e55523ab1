"""Each object that owns a thread, a lock, a descriptor or a connection, used in a forked process.

There it gives what is right, or an error that says what to do. The process that made it goes on unharmed, also where
the child runs its finalizers.
"""

from pathlib import Path

import torch

import tierstore
from tests.children import run

CODE = """
import gc, multiprocessing, threading
from tierstore.system import killpoints

store = tierstore.open(sys.argv[1], ddr="2MiB", threads=2)
reader = tierstore.open(sys.argv[1], mode="r", ddr="2MiB", threads=1)
memory = tierstore.open(cold="memory", ddr="4MiB", threads=1)
memory.create_table(table_config())
memory.optimizer()  # imports much of torch, which no child needs to do again
table, ids = store["t"], torch.arange(2000)
bag = tierstore.TieredEmbeddingBag(table)
batches = [ids[start : start + 50].view(-1, 5) for start in range(0, 2000, 50)]
pipeline = tierstore.prefetch(batches, bag, depth=2)
plain = tierstore.prefetch(batches, bag, depth=0)
next(pipeline), next(plain)
recorder = store.record(sys.argv[1] + "/../t.npz", rate=1.0)
held, goes_on = threading.Event(), threading.Event()
def hold(name):
    if name == "commit: frozen rows written":
        held.set()
        goes_on.wait()
table.write(ids[:10], torch.full((10, 16), 5.0))
killpoints.hook = hold
pending = store.commit_async()
held.wait()  # in the thread of the commit

uses = {
    "Table.read": (lambda: table.read(ids), "ClosedError"),
    "Table.write": (lambda: table.write(ids[:1], torch.ones(1, 16)), "ClosedError"),
    "module": (lambda: bag(batches[0]), "ClosedError"),
    "commit": (lambda: store.commit(), "ClosedError"),
    "create_table": (lambda: store.create_table(table_config(name="u")), "ClosedError"),
    "rollback": (lambda: store.rollback(1), "ClosedError"),
    "stats": (lambda: store.stats(), "ClosedError"),
    "verify": (lambda: store.verify(), "ClosedError"),
    "backup": (lambda: store.backup(sys.argv[1] + "/../copy"), "ClosedError"),
    "optimizer": (lambda: store.optimizer(), "ClosedError"),
    "record": (lambda: store.record(sys.argv[1] + "/../u.npz"), "ClosedError"),
    "refresh": (lambda: reader.refresh(), "ClosedError"),
    "reader's Table.read": (lambda: reader["t"].read(ids), "ClosedError"),
    "in memory": (lambda: memory["t"].read(ids), "ClosedError"),
    "version": (lambda: store.version, "1"),
    "extra": (lambda: store.extra, "{'step': 1}"),
    "tensors": (lambda: store.tensors()["w"].tolist(), "[1.0, 1.0, 1.0]"),
    "PendingCommit": (lambda: pending.result(), "ClosedError"),
    "pipeline": (lambda: next(pipeline), "ClosedError"),
    "pipeline without a thread": (lambda: next(plain), "ClosedError"),
    "pipeline.close": (lambda: pipeline.close(), "None"),
    "Recorder.describe": (lambda: recorder.describe(), "ClosedError"),
    "Recorder.stop": (lambda: recorder.stop(), "None"),
    "close": (lambda: (store.close(), reader.close(), memory.close())[0], "None"),
    "open": (lambda: tierstore.open(sys.argv[1], mode="r", ddr="2MiB", threads=2)["t"].pooled(
        torch.zeros(100_000, dtype=torch.int64), torch.arange(0, 100_001, 100)).unique().tolist(), "[300.0]"),
}

def told(use):
    signal.alarm(60)
    try:
        return str(use())
    except errors.ClosedError as error:
        return f"ClosedError: {error}"

def check(name, said):
    expected = uses[name][1]
    is_refused = said.startswith("ClosedError") and "fork" in said
    assert is_refused if expected == "ClosedError" else said == expected, (name, said)

def use_all():
    for name, (use, _) in uses.items():
        check(name, told(use))

def use_and_drop():
    use_all()
    globals().update(store=None, reader=None, memory=None, table=None, bag=None, pipeline=None, plain=None,
                     recorder=None, pending=None, uses={})
    gc.collect()

for number in range(2):
    if not os.fork():
        (use_and_drop if number % 2 else use_all)()
        sys.exit(7)  # runs finalizers, and what is to be done at exit
kid = multiprocessing.get_context("fork").Process(target=use_all)
kid.start()
kid.join()
assert kid.exitcode == 0, kid.exitcode
for _ in range(2):
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7

killpoints.hook = None
goes_on.set()
assert pending.result() == 2
assert [bag(batch).shape for batch in pipeline] == [(10, 16)] * 39
pipeline.close(), plain.close()
assert reader.refresh() == 2
assert torch.equal(reader["t"].read(ids[:10]), torch.full((10, 16), 5.0))
table.write(ids, torch.full((2000, 16), 6.0))
assert store.commit() == 3
recorder.stop()
store.close()
with tierstore.open(sys.argv[1], ddr="2MiB") as again:
    assert again["t"].read(ids).unique().tolist() == [6.0]
print("unharmed")
"""


def test_forked_processes_are_right_or_refused_and_harm_nothing(store_dir: Path) -> None:
    config = tierstore.TableConfig(name="t", num_embeddings=2000, embedding_dim=16)
    with tierstore.open(store_dir, ddr="2MiB", threads=1) as store:
        store.create_table(config).write(torch.arange(2000), torch.full((2000, 16), 3.0))
        store.commit(extra={"step": 1}, tensors={"w": torch.ones(3)})
    assert run(CODE, store_dir, timeout=240).splitlines()[-1] == "unharmed"


LARGE = """
store = tierstore.open(cold="memory", ddr="16MiB", threads=2)
table = store.create_table(table_config())
ids, offsets = torch.zeros(400_000, dtype=torch.int64), torch.arange(0, 400_001, 1000)
expected = table.pooled(ids, offsets)  # by threads that torch computes with
def again():
    signal.alarm(100)
    with tierstore.open(cold="memory", ddr="16MiB", threads=2) as own:
        return torch.equal(own.create_table(table_config()).pooled(ids, offsets), expected)
forked(again)
"""


def test_a_forked_process_computes_by_threads_of_its_own() -> None:
    assert run(LARGE, changes={"OMP_NUM_THREADS": "2"}) == "ok True\n"
