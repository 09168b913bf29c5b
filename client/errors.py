"""What can go wrong for a client, by whose fault it is. Every message is one line that a user can act on."""

from __future__ import annotations

from protocol.messages import RejectCode


class ClientError(Exception):
    """Base of all errors of this package."""


class ServerUnavailable(ClientError):
    """There is no server, or it has not answered within the deadline."""


class RequestLost(ServerUnavailable):
    """The server lives but no longer knows the request (it was restarted). The same request may be sent again."""


class RequestRejected(ClientError):
    """The server (or a check before sending) did not accept the request; `param` names the field at fault."""

    def __init__(self, code: RejectCode, message: str, param: str = ""):
        super().__init__(f"{message} ({code}, {param})" if param else f"{message} ({code})")
        self.code = code
        self.message = message
        self.param = param


class GenerationFailed(ClientError):
    """The request was accepted and then ended with an error of the server's."""


class BrokenStream(ClientError):
    """Tokens came in an order that the protocol rules out: a bug in the server, never to be papered over."""


class PromptError(ClientError, ValueError):
    """The prompt cannot be turned into tokens: no tokenizer, no chat template, or one that refuses the messages."""
