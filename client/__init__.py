"""Python client of a Pageplane server: `AsyncClient`, its synchronous twin `Client`, and `python -m client`.

Knows the client plane of `protocol` and how to turn text into tokens and back; nothing of the scheduler or of torch.
"""

from client.aio import AsyncClient
from client.chunk import Chunk, Completion
from client.errors import (
    BrokenStream,
    ClientError,
    GenerationFailed,
    PromptError,
    RequestLost,
    RequestRejected,
    ServerUnavailable,
)
from client.stream import Stream
from client.sync import Client
from protocol.logprobs import TokenLogprobs
from protocol.messages import SamplingParams, ServerInfo, Status, StructuredOutputsParams, Usage

__all__ = [
    "AsyncClient",
    "BrokenStream",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "GenerationFailed",
    "PromptError",
    "RequestLost",
    "RequestRejected",
    "SamplingParams",
    "ServerInfo",
    "ServerUnavailable",
    "Status",
    "Stream",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "Usage",
]
