"""GET /v1/models, /v1/models/{name}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.replies import ERRORS, Model, ModelList
from gateway.state import Gateway, Shared

router = APIRouter(tags=["OpenAI"])


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.config.model_name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "pageplane",
        "root": gateway.config.model,
        "max_model_len": gateway.max_model_len,
    }


@router.get("/v1/models", response_model=ModelList)
async def list_models(gateway: Shared) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(gateway)]}


@router.get("/v1/models/{name:path}", response_model=Model, responses={404: ERRORS[404]})
async def retrieve_model(name: str, gateway: Shared) -> dict[str, Any]:
    """The model of this name."""
    gateway.check_model(name)
    return _model(gateway)
