"""`python -m client chat`: a conversation. Ctrl-C ends the answer being given, not the conversation."""

from __future__ import annotations

import sys
from contextlib import closing, suppress

from rich.console import Console

from client.chat_template import Message
from client.commands.options import add_sampling, parser, sampling_of
from client.errors import ClientError, PromptError, ServerUnavailable
from client.sync import Client
from protocol.messages import SamplingParams

_HELP = "/reset starts over, /quit (or Ctrl-D) leaves, Ctrl-C ends an answer"


def main(arguments: list[str]) -> int:
    """Talk until the user leaves; return the exit code."""
    command = parser(" chat", "Talk to the model, with memory of the conversation.")
    command.add_argument("--system", metavar="TEXT", help="system message at the beginning")
    add_sampling(command)
    options = command.parse_args(arguments)
    with Client(options.endpoint) as client:
        if client.tokenizer().chat_template is None:
            raise PromptError('the model has no chat template; ask with: python -m client --raw "text"')
        _Conversation(client, options.system, sampling_of(options)).run()
    return 0


class _Conversation:
    def __init__(self, client: Client, system: str | None, sampling: SamplingParams):
        self._client = client
        self._sampling = sampling
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._interactive = sys.stdin.isatty()
        self._console = Console(highlight=False)

    def run(self) -> None:
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and line editing)
            self._console.print(f"[bold]{self._client.server_info().model_name}[/]  [dim]{_HELP}[/]")
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._messages = list(self._opening)
                    self._console.print("[dim]The conversation starts over.[/]")
                case "/help":
                    self._console.print(f"[dim]{_HELP}[/]")
                case text:
                    self._turn(text)

    def _read(self) -> str | None:
        """The next line, None at the end. Ctrl-C drops what was typed."""
        while True:
            try:
                # \001 and \002 tell readline that what is between takes no room
                return input("\001\033[1;32m\002you>\001\033[0m\002 " if self._interactive else "")
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                print()

    def _turn(self, text: str) -> None:
        question: Message = {"role": "user", "content": text}
        answer = ""
        try:
            with closing(self._client.generate([*self._messages, question], self._sampling)) as chunks:
                for chunk in chunks:
                    answer += chunk.text
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" …")
        except ServerUnavailable:
            raise
        except ClientError as error:
            self._console.print(f"[red]{error}[/]")
            return
        print(flush=True)
        self._messages += [question, {"role": "assistant", "content": answer}]
