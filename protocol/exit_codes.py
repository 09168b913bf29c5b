"""Exit codes that mean something to the supervisor, beside 0 and 1."""

from __future__ import annotations

CANNOT_SERVE = 78
"""As configured, this process cannot serve here, and the next try would end the same (EX_CONFIG of sysexits.h)."""
