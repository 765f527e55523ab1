"""What bench.dist measures by."""

import random
import subprocess
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import tierstore
from bench.sharded.counted import counts_in, noting
from bench.sharded.kills_part import _kill_until
from bench.sharded.sockets import count_sent
from bench.sharded.step_part import joined

from .ranks import run

FLOATS, IDS = 300_000, 20_000


def send() -> tuple[int, int]:
    own = dist.get_rank()
    sizes = [1_000, 1_000]
    sizes[1 - own] = FLOATS

    def exchange() -> None:
        values, ids = torch.zeros(sum(sizes)), torch.zeros(2 * IDS, dtype=torch.int64)
        dist.all_to_all_single(torch.empty_like(values), values, sizes, sizes)
        dist.all_to_all_single(torch.empty_like(ids), ids)
        dist.all_reduce(torch.zeros(1))

    exchange()  # connections are made
    return count_sent(exchange)


def test_bytes_sent_are_those_to_other_ranks(tmp_path: Path) -> None:
    for total, ids in run(send, 2, tmp_path):
        assert ids == 8 * IDS
        assert 4 * FLOATS + ids < total < 4 * FLOATS + ids + 1_000


def bags(batch: tierstore.KeyedJaggedTensor) -> list[list[int]]:
    return [part.tolist() for part in torch.split(batch.values(), batch.lengths().tolist())]


def test_batches_are_joined_bag_by_bag() -> None:
    one, other = (
        tierstore.KeyedJaggedTensor(["f0", "f1"], torch.arange(first, first + 6), lengths=torch.tensor([1, 2, 0, 3]))
        for first in (0, 10)
    )
    whole = joined([one, other])
    assert bags(whole) == [[0], [1, 2], [10], [11, 12], [], [3, 4, 5], [], [13, 14, 15]]


def test_steps_that_a_restart_does_again_are_counted(tmp_path: Path) -> None:
    for restart, steps in enumerate((3, 2, 1)):
        step = noting(lambda given: given + 1, tmp_path / "steps", restart)
        assert [step(each) for each in range(steps)] == list(range(1, steps + 1))
    assert counts_in(tmp_path / "steps") == (6, 2)


def test_every_second_kill_waits_until_ranks_train(tmp_path: Path) -> None:
    """Of four starts of a rank only the first and the third train, some time later; it ends when it is killed."""
    steps = tmp_path / "steps"
    rank = f"[ $((turn % 2)) = 0 ] || (sleep 0.3; echo 0 >> {steps}); exec sleep 60"
    restarting = f"for turn in 1 2 3 4; do export turn; echo >> {tmp_path / 'starts'}; sh -c '{rank}'; done"
    with subprocess.Popen(["sh", "-c", restarting], stderr=subprocess.DEVNULL) as torchrun:
        try:
            killed = _kill_until(torchrun, steps, time.monotonic() + 60, 0.05, random.Random(1))
        finally:
            for child in psutil.Process(torchrun.pid).children() if torchrun.poll() is None else ():
                torchrun.kill()
                child.kill()
    assert killed == {"training": 2, "starting": 2}
    assert counts_in(steps).steps == killed["training"]
    assert len((tmp_path / "starts").read_text()) == sum(killed.values())
