"""GET /health, /version"""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.answers import encode
from gateway.replies import Health, Version
from gateway.state import Shared
from gateway.version import VERSION

router = APIRouter(tags=["operation"])


@router.get("/health", responses={200: {"model": Health}, 503: {"model": Health, "description": "down"}})
async def health(gateway: Shared) -> Response:
    """Can tokens be generated now? ok: all replicas live; degraded: some do; down (503): none, or no scheduler."""
    status = await gateway.upstream.status()
    replicas = [
        {
            "replica": replica.replica,
            "state": replica.state,
            "epoch": replica.epoch,
            "running": replica.running,
            "free_blocks": replica.free_blocks,
            "total_blocks": replica.total_blocks,
        }
        for replica in (status.replicas if status else ())
    ]
    alive = sum(replica["state"] == "ready" for replica in replicas)
    verdict = "down" if not alive else "ok" if alive == len(replicas) else "degraded"
    content = {"status": verdict, "replicas": replicas, "waiting": status.waiting if status else 0}
    return Response(encode(content), 200 if alive else 503, media_type="application/json")


@router.get("/version", response_model=Version)
async def version() -> dict[str, str]:
    """The version of Pageplane."""
    return {"version": VERSION}
