"""A server whose client leaves answers unread, beside a trainer: every lookup is answered, with the right rows."""

import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.following import Child
from tests.serve.raw_http2 import RawClient
from tests.serve.whole import WAIT_SECONDS, serving, wait_for
from tierstore.serve import program
from tierstore.serve.grpc.limits import GrpcLimits
from tierstore.serve.grpc.messages import INFERENCE_SERVICE

ROWS, DIM = 100_000, 16
"""Of which the server, with 4 MiB, has a third or so in memory."""

TRAINER = """
import sys
import torch, tierstore
with tierstore.open(sys.argv[1], ddr="8MiB", keep=1) as store:
    table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=int(sys.argv[2]),
        embedding_dim=int(sys.argv[3]), init=tierstore.init.Constant(1.0)))
    ids = torch.arange(table.config.num_embeddings)
    for step, line in enumerate(sys.stdin, start=1):
        table.write(ids, torch.full((len(ids), table.config.embedding_dim), float(step)))
        store.commit()
        print(step, flush=True)
"""


def request_of(ids: np.ndarray) -> Any:
    message = service_pb2.ModelInferRequest(model_name="rows.item")
    message.inputs.add(name="ids", datatype="INT64", shape=[len(ids)])
    message.raw_input_contents.append(ids.astype(np.int64).tobytes())
    return message


class Lookups:
    """A client that looks up rows all the while, which are to be of one commit each time."""

    def __init__(self, address: str, seed: int) -> None:
        self.wrong: list[str] = []
        self.num_answers = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, np.random.default_rng(seed)))
        self._thread.start()

    def _run(self, address: str, generator: np.random.Generator) -> None:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._is_over.is_set():
                try:
                    answer = stub.ModelInfer(request_of(generator.integers(0, ROWS, 500)), timeout=WAIT_SECONDS)
                except grpc.RpcError as error:
                    self.wrong.append(f"{error.code()}: {error.details()}")
                    continue
                rows = np.frombuffer(answer.raw_output_contents[0], np.float32)
                self.num_answers += 1
                if len(rows) != 500 * DIM or len(set(rows)) != 1:
                    self.wrong.append(f"{len(rows)} values of commits {sorted(set(rows))}")

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_SECONDS)


@pytest.mark.parametrize("num_unread", [1, pytest.param(300, marks=pytest.mark.soak)])
def test_unread_answers_do_not_disturb_lookups_beside_a_trainer(
    store_dir: Path, num_unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GrpcLimits", partial(GrpcLimits, send_seconds=0.1))
    trainer = Child(TRAINER, str(store_dir), str(ROWS), str(DIM))
    assert trainer.ask("commit") == "1\n"
    large = request_of(np.arange(4000)).SerializeToString()
    with serving(store_dir) as server, ExitStack() as resources:
        lookups = [Lookups(server.grpc, seed) for seed in range(2)]
        resources.callback(lambda: [each.end() for each in lookups])
        wait_for(lambda: all(each.num_answers for each in lookups), "answers")
        service: Any = server.server._grpc._service
        client = resources.enter_context(RawClient(server.ports.grpc, timeout_seconds=WAIT_SECONDS))
        for _ in range(num_unread):
            call = client.begin(f"/{INFERENCE_SERVICE}/ModelInfer", large)
            for _ in range(3):
                trainer.ask("commit")
            client.wait_end(call)
        wait_for(lambda: service.unsent_bytes < 300_000, "no answer to be unread")
        for each in lookups:
            each.end()
        assert not [wrong for each in lookups for wrong in each.wrong]
        assert all(each.num_answers for each in lookups)
    trainer.end()
