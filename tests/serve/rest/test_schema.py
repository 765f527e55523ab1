"""The REST API's own description, tried against the server by a program that knows nothing else of it."""

from collections.abc import Iterator

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.serve.rest_server import RestServer, serving
from tierstore.serve.rest.openapi import DESCRIPTION

EXAMPLES = 15
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
CHECKS = [
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
    not_a_server_error,
]


@pytest.fixture(scope="module")
def server() -> Iterator[RestServer]:
    with serving() as running:
        # The models that fail by themselves, or for ever wait, have tests of their own.
        for name in ("broken", "full", "late", "slow"):
            del running.engine._models[name]
        yield running


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck), derandomize=True, deadline=None
)
def test_the_server_does_as_described(server: RestServer, case: schemathesis.Case) -> None:
    if "model" in case.path_parameters:
        case.path_parameters["model"] = "echo"
    if "version" in case.path_parameters and len(case.path_parameters["version"]) % 2:
        case.path_parameters["version"] = "7"
    case.call_and_validate(base_url=f"http://{server.address}", checks=CHECKS)


def test_the_description_is_served_and_lists_every_path(server: RestServer) -> None:
    with httpx.Client(base_url=f"http://{server.address}", trust_env=False) as client:
        assert client.get("/v2/openapi.json").json() == DESCRIPTION
        for path, operations in DESCRIPTION["paths"].items():
            place = path.replace("{model}", "echo").replace("{version}", "7")
            for method in ("get", "post"):
                status = client.request(method, place, json={"inputs": []}).status_code
                assert status == (200 if method in operations else 405), place
