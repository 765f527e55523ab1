"""Options of gRPC are names, and a name that it does not know is ignored without a word."""

from pathlib import Path

from grpc._cython import cygrpc

from tierstore.serve.grpc.server import _options
from tierstore.serve.limits import Limits


def test_grpc_has_all_options_that_are_set() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in _options(Limits(), reuse_port=True) if name.encode() + b"\0" not in library] == []
