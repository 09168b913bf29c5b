"""Who may see the live page's data and who may press its button. Knows requests' headers and addresses, not the page.

The button ends a process, so five things must hold: it is switched on; the request comes from this machine, with no
proxy between; its Host is a name of this machine (another site's name that was made to lead here is refused: DNS
rebinding); its Origin is that very host (another site's page is refused); and it bears the token that only a page
which was served here could read. No cookie is involved, so there is nothing that a browser would add by itself.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from urllib.parse import urlsplit

from starlette.requests import Request

from gateway.errors import ApiError
from protocol.config import EngineConfig

TOKEN_HEADER = "X-Pageplane-Token"
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Guard:
    """One token for the life of this gateway."""

    def __init__(self, config: EngineConfig):
        self._kill_button = config.kill_button
        self._token = secrets.token_urlsafe(32)

    def refusal(self, request: Request) -> str | None:
        """Why whoever asks gets no button; None: the page that was asked for may have it."""
        if not self._kill_button:
            return "the button is switched off (--no-kill-button)"
        if any(name in request.headers for name in _PROXY_HEADERS):
            return "workers are killed without a proxy only"
        if request.client is None or not is_loopback(request.client.host):
            return "workers are killed from the server's own machine only"
        if not is_loopback(_host(request)):
            return "workers are killed under a name of this machine only, as localhost or 127.0.0.1"
        return None

    def token_for(self, request: Request) -> str:
        """What a page needs for its button; empty: it gets none."""
        return "" if self.refusal(request) else self._token

    def check_kill(self, request: Request) -> None:
        """Raises ApiError(403) unless everything holds."""
        reason = self.refusal(request) or self._foreign_origin(request)
        if reason is None and not hmac.compare_digest(
            request.headers.get(TOKEN_HEADER, "").encode(), self._token.encode()
        ):
            reason = f"the page's token is missing or of an earlier gateway ({TOKEN_HEADER}); load the page again"
        if reason is not None:
            raise ApiError(403, reason, kind="permission_error", code="not_allowed")

    def _foreign_origin(self, request: Request) -> str | None:
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return "another site's page may not do this"
        origin = urlsplit(request.headers.get("origin", ""))
        if origin.scheme not in ("http", "https") or origin.netloc != request.headers.get("host"):
            return "another site's page may not do this (Origin and Host differ)"
        return None


def _host(request: Request) -> str:
    """The Host header's name, without port and brackets; empty if it is none."""
    try:
        return urlsplit("//" + request.headers.get("host", "")).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether this name or address always means the machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
