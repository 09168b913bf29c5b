"""The shape an output must have, by whichever of its names it was asked for: response_format is OpenAI's,
structured_outputs vLLM's, and guided_json, guided_regex, guided_choice are vLLM's older ones."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gateway.errors import ApiError
from gateway.schema import Generation
from protocol.messages import StructuredOutputsParams


class Asked(NamedTuple):
    """`param`: how the client named it."""

    params: StructuredOutputsParams
    param: str


def shape_of(body: Generation) -> Asked | None:
    """What the body asks for; None: no shape. Raises ApiError when it asks twice or half."""
    found = []
    response_format, outputs = body.response_format, body.structured_outputs
    if response_format is not None and response_format.json_schema is not None:
        found.append(_json(response_format.json_schema.schema_, "response_format"))
    elif response_format is not None and response_format.type == "json_object":
        found.append(Asked(StructuredOutputsParams(json_object=True), "response_format"))
    if outputs is not None:
        found.append(_structured(outputs.json_, outputs.regex, outputs.choice, bool(outputs.json_object)))
    if body.guided_json is not None:
        found.append(_json(body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        found.append(Asked(StructuredOutputsParams(regex=body.guided_regex), "guided_regex"))
    if body.guided_choice is not None:
        found.append(Asked(StructuredOutputsParams(choice=tuple(body.guided_choice)), "guided_choice"))
    if len(found) > 1:
        raise ApiError(400, f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param)
    return found[0] if found else None


def _structured(schema: Any, regex: str | None, choice: list[str] | None, json_object: bool) -> Asked:
    name = "structured_outputs"
    if sum((schema is not None, regex is not None, choice is not None, json_object)) != 1:
        raise ApiError(400, f"{name} needs exactly one of json, regex, choice and json_object", param=name)
    if schema is not None:
        return _json(schema, name)
    return Asked(StructuredOutputsParams(regex=regex, choice=tuple(choice or ()), json_object=json_object), name)


def _json(schema: dict[str, Any] | bool | str, param: str) -> Asked:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{param} is no JSON schema: {error}", param=param) from None
    return Asked(StructuredOutputsParams(json=text), param)
