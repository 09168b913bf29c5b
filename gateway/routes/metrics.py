"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.state import Shared

router = APIRouter(tags=["operation"])


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def metrics(gateway: Shared) -> Response:
    """Prometheus' text format."""
    return Response(gateway.metrics.text(await gateway.upstream.metrics()), media_type=CONTENT_TYPE_LATEST)
