"""The version that is told to the world."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pageplane")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0+unknown"
