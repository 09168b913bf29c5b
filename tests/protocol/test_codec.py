"""Frames: every message arrives as it was sent; anything else is a ProtocolError and nothing worse."""

from __future__ import annotations

import pickle
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol import messages as m
from protocol.arrays import pack, packer, unpack

PLANES: list[tuple[codec.Decoder[Any], Any]] = [
    (codec.worker_to_scheduler, m.WorkerToScheduler),
    (codec.scheduler_to_worker, m.SchedulerToWorker),
    (codec.client_to_scheduler, m.ClientToScheduler),
    (codec.scheduler_to_client, m.SchedulerToClient),
    (codec.supervisor_to_scheduler, m.SupervisorToScheduler),
    (codec.scheduler_to_supervisor, m.SchedulerToSupervisor),
]
PAIRS = [(decoder, kind) for decoder, union in PLANES for kind in typing.get_args(union)]
DECODERS = [decoder for decoder, _ in PLANES]

INTS = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)


def messages_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any value of a message type, from its fields' types."""
    hints = typing.get_type_hints(kind)
    fields = {name: values_of(UINT64 if name in ("digest", "seed") else hints[name]) for name in kind.__struct_fields__}
    if kind is m.SamplingParams:
        fields["seed"] = st.none() | UINT64
    return st.builds(kind, **fields)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, st.SearchStrategy):
        return hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(*map(values_of, arguments), max_size=3)
    if arguments and type(None) in arguments:
        return st.none() | st.one_of(*(values_of(each) for each in arguments if each is not type(None)))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return messages_of(hint)
    simple = {
        int: INTS,
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return simple[hint]


@pytest.mark.parametrize(("decoder", "kind"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_message_arrives_as_it_was_sent(decoder: codec.Decoder[Any], kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(messages_of(kind))
    def arrives(message: msgspec.Struct) -> None:
        received = decoder.decode(codec.encode(message))
        assert received == message and type(received) is kind

    arrives()


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes, versioned: bool) -> None:
    frame = bytes([m.PROTOCOL_VERSION]) + data if versioned else data
    for decoder in DECODERS:
        try:
            decoder.decode(frame)
        except codec.ProtocolError:
            pass


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_messages_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    decoder, kind = data.draw(st.sampled_from(PAIRS))
    frame = bytearray(codec.encode(data.draw(messages_of(kind))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            decoder.decode(damaged)
        except codec.ProtocolError:
            pass


@pytest.mark.parametrize(("decoder", "kind"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_message_of_another_plane_or_direction_is_malformed(decoder: codec.Decoder[Any], kind: type) -> None:
    frame = codec.encode(_example(kind))
    for other, union in PLANES:
        if kind not in typing.get_args(union):
            with pytest.raises(codec.MalformedFrame):
                other.decode(frame)


def _example(kind: type) -> msgspec.Struct:
    return _plain(kind)


def _plain(hint: Any) -> Any:
    """The dullest value of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return ()
    if arguments and type(None) in arguments:
        return None
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _plain(hints[name]) for name in hint.__struct_fields__})
    return hint()


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_pickle_is_malformed_and_never_loaded(decoder: codec.Decoder[Any]) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("unpickled",))

    for frame in (pickle.dumps(Bomb()), bytes([m.PROTOCOL_VERSION]) + pickle.dumps(Bomb())):
        with pytest.raises(codec.ProtocolError):
            decoder.decode(frame)


@pytest.mark.parametrize("frame", [b"", b"\x01", b"\x01\xc1", b"\x01\xdd\x40\x00\x00\x00", b"\x01\xc6\x40\x00\x00\x00"])
def test_cut_frames_and_lying_lengths_are_malformed(frame: bytes) -> None:
    """The last two claim an array and a byte string of a gigabyte."""
    for decoder in DECODERS:
        with pytest.raises(codec.MalformedFrame):
            decoder.decode(frame)


def test_deep_nesting_is_malformed() -> None:
    for decoder in DECODERS:
        with pytest.raises(codec.MalformedFrame):
            decoder.decode(bytes([m.PROTOCOL_VERSION]) + b"\x91" * 100_000 + b"\xc0")


def test_another_version_is_named_with_ours() -> None:
    frame = bytes([m.PROTOCOL_VERSION + 6]) + codec.encode(m.Watch())[1:]
    with pytest.raises(codec.VersionMismatch, match=f"version {m.PROTOCOL_VERSION + 6}, we speak {m.PROTOCOL_VERSION}"):
        codec.supervisor_to_scheduler.decode(frame)


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    small: codec.Decoder[Any] = codec.Decoder(m.ClientToScheduler, max_bytes=100)
    frame = codec.encode(m.Submit("r", bytes(200), m.SamplingParams()))
    with pytest.raises(codec.FrameTooLarge, match="exceeds 100"):
        small.decode(frame)
    with pytest.raises(codec.FrameTooLarge, match="Submit of"):
        codec.encode(m.Submit("r", bytes(codec.MAX_FRAME_BYTES), m.SamplingParams()))


def test_a_kept_buffer_holds_each_frame_as_if_it_were_the_first() -> None:
    encoder = codec.Encoder()
    long, short = (m.Submit(name, bytes(size), m.SamplingParams()) for name, size in (("long", 9000), ("short", 4)))
    for message in (long, short, long):
        assert bytes(encoder.encode(message)) == codec.encode(message)
    with pytest.raises(codec.FrameTooLarge, match="Submit of"):
        encoder.encode(m.Submit("r", bytes(codec.MAX_FRAME_BYTES), m.SamplingParams()))
    with pytest.raises(TypeError):
        encoder.encode(m.Submit("r", object(), m.SamplingParams()))  # type: ignore[arg-type]
    assert bytes(encoder.encode(short)) == codec.encode(short), "what could not be sent leaves nothing behind"


@pytest.mark.parametrize("message", [["submit", 5, b"", []], ["submit", "r", "text", []], ["submit"], ["none"], {}, 5])
def test_fields_of_the_wrong_type_are_malformed(message: Any) -> None:
    with pytest.raises(codec.MalformedFrame):
        codec.client_to_scheduler.decode(bytes([m.PROTOCOL_VERSION]) + msgspec.msgpack.encode(message))


def test_a_newer_peers_last_fields_are_passed_over() -> None:
    """New fields come last: an older reader ignores them."""
    newer = msgspec.msgpack.encode(["abort", "r", "abort", "a field we do not know"])
    assert codec.client_to_scheduler.decode(bytes([m.PROTOCOL_VERSION]) + newer) == m.Abort("r")


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_an_array_arrives_as_it_was_sent(values: list[int]) -> None:
    assert unpack(pack(values)).tolist() == values


def test_arrays_are_little_endian_int32() -> None:
    assert pack([1, -1]) == packer(2)(1, -1) == b"\x01\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
def test_bytes_that_are_no_whole_number_of_elements_are_malformed(length: int) -> None:
    with pytest.raises(codec.MalformedFrame, match=f"tokens: {length} bytes are no int32 array"):
        unpack(bytes(length), "tokens")


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_number_that_does_not_fit_is_not_sent(value: int) -> None:
    with pytest.raises(OverflowError):
        pack([value])
