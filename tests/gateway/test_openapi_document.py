"""The OpenAPI document against the server it describes: whatever it allows, or nearly allows, is no error of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from gateway.app import build
from gateway.refused import Unsupported
from protocol.config import EngineConfig
from tests.tiny_model import tiny_model

GENERATING = ("/v1/completions", "/v1/chat/completions")
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


APPLICATION = build(EngineConfig(model=str(tiny_model()), model_name="tiny"), Path("/nonexistent"))
schema = schemathesis.openapi.from_dict(APPLICATION.openapi())


def cheap(body: Any) -> None:
    """What is generated costs time and tells nothing more after a few tokens; what is refused by name is not worth
    another example."""
    for name in Unsupported.model_fields:
        body.pop(name, None)
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool) and body[name] > 4:
            body[name] = 4
    if body.get("max_tokens") is None:
        body["max_tokens"] = 4
    if isinstance(body.get("n"), int) and 4 < body["n"] <= 128:
        body["n"] = 4
    if body.get("model"):
        body["model"] = "tiny"


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_an_error_of_the_server(case: Any, url: str) -> None:
    if case.operation.path in GENERATING and isinstance(case.body, dict):
        cheap(case.body)
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=30)


def test_every_parameter_says_what_it_is(http: httpx.Client) -> None:
    """The page at /docs is made of this document."""
    assert http.get("/docs").status_code == 200
    found = http.get("/openapi.json").json()
    assert set(GENERATING) <= set(found["paths"])
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert operation.get("summary") and operation.get("description"), path
