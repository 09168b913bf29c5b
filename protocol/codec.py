"""Frames ↔ messages: one version byte, then msgpack, decoded strictly into a closed union. Nobody else sees bytes."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from protocol import messages as m

MAX_FRAME_BYTES = 64 * 1024 * 1024

Inbound = TypeVar("Inbound")


class ProtocolError(ValueError):
    """A frame that is not one of ours. The peer that sent it is at fault; the receiver counts and drops it."""


class FrameTooLarge(ProtocolError):
    """Longer than the size limit."""


class VersionMismatch(ProtocolError):
    """Another protocol version; the message names both."""


class MalformedFrame(ProtocolError):
    """Not msgpack, not a message of this plane, or a field of the wrong type."""


_ENCODER = msgspec.msgpack.Encoder()
_PREFIX = bytes([m.PROTOCOL_VERSION])
_COPIED_BYTES = 4096
"""A frame shorter than this is copied sooner than a view of it is made."""


def encode(message: msgspec.Struct) -> bytes:
    """Message → frame. Raises FrameTooLarge rather than send what the peer would refuse."""
    frame = _PREFIX + _ENCODER.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise _too_large(message, len(frame))
    return frame


def _too_large(message: msgspec.Struct, num_bytes: int) -> FrameTooLarge:
    return FrameTooLarge(f"{type(message).__name__} of {num_bytes} bytes exceeds {MAX_FRAME_BYTES}")


class Encoder:
    """Encodes as `encode` does, into a buffer that it keeps: for who sends each frame before it makes the next one."""

    def __init__(self) -> None:
        self._buffer = bytearray(_PREFIX)

    def encode(self, message: msgspec.Struct) -> bytearray:
        """Message → frame, which the next call overwrites. Raises FrameTooLarge."""
        frame = self._buffer
        _ENCODER.encode_into(message, frame, len(_PREFIX))
        if len(frame) > MAX_FRAME_BYTES:
            raise _too_large(message, len(frame))
        return frame


class Decoder(Generic[Inbound]):
    """Decodes the frames of one plane and direction."""

    def __init__(self, union: Any, max_bytes: int = MAX_FRAME_BYTES):
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union, strict=True)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> Inbound:
        """Frame → message. Raises FrameTooLarge, VersionMismatch or MalformedFrame, all ProtocolError."""
        if len(frame) > self._max_bytes:
            raise FrameTooLarge(f"frame of {len(frame)} bytes exceeds {self._max_bytes}")
        if len(frame) < 2:
            raise MalformedFrame(f"frame of {len(frame)} bytes")
        if frame[0] != m.PROTOCOL_VERSION:
            raise VersionMismatch(f"peer speaks protocol version {frame[0]}, we speak {m.PROTOCOL_VERSION}")
        try:
            body = frame[1:] if len(frame) < _COPIED_BYTES else memoryview(frame)[1:]
            message: Inbound = self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedFrame(str(error)) from None
        return message


worker_to_scheduler: Decoder[m.WorkerToScheduler] = Decoder(m.WorkerToScheduler)
scheduler_to_worker: Decoder[m.SchedulerToWorker] = Decoder(m.SchedulerToWorker)
client_to_scheduler: Decoder[m.ClientToScheduler] = Decoder(m.ClientToScheduler)
scheduler_to_client: Decoder[m.SchedulerToClient] = Decoder(m.SchedulerToClient)
supervisor_to_scheduler: Decoder[m.SupervisorToScheduler] = Decoder(m.SupervisorToScheduler)
scheduler_to_supervisor: Decoder[m.SchedulerToSupervisor] = Decoder(m.SchedulerToSupervisor)
