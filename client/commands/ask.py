"""`python -m client "prompt"`: one question, its answer streamed to stdout."""

from __future__ import annotations

import sys
from contextlib import closing

from client.aio import Prompt
from client.chat_template import Message
from client.chunk import Chunk
from client.commands.options import add_sampling, parser, sampling_of
from client.errors import PromptError
from client.sync import Client
from protocol.messages import SamplingParams

_EPILOG = """\
commands (as the first argument):
  chat      talk to the model, with memory of the conversation
  batch     answer every line of a JSONL file
  status    watch workers, queues and blocks
A prompt that is one of these words: python -m client -p status
"""


def main(arguments: list[str]) -> int:
    """Ask; return the exit code."""
    command = parser("", "Ask a running Pageplane server.", epilog=_EPILOG)
    command.add_argument("prompt", nargs="?", help="the text; - or nothing with a pipe: read from stdin")
    command.add_argument("-p", "--prompt", dest="forced", metavar="TEXT", help="the text, whatever it looks like")
    command.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    command.add_argument("--system", metavar="TEXT", help="system message in front of the prompt")
    command.add_argument("--usage", action="store_true", help="print token counts to stderr at the end")
    add_sampling(command)
    options = command.parse_args(arguments)
    if options.prompt is not None and options.forced is not None:
        command.error("give the prompt once, either plain or with -p")
    text = options.forced if options.forced is not None else options.prompt
    if text is None and sys.stdin.isatty():
        command.error("a prompt is needed")
    if options.forced is None and text in (None, "-"):
        text = sys.stdin.read()
    if not text:
        raise PromptError("the prompt is empty")
    with Client(options.endpoint) as client:
        prompt = _prompt(client, text, options.system, raw=options.raw)
        last = _stream(client, prompt, sampling_of(options))
    if options.usage:
        assert last.usage is not None
        print(
            f"{last.usage.prompt_tokens} prompt tokens ({last.usage.cached_tokens} cached), "
            f"{last.usage.completion_tokens} generated, finish reason {last.finish_reason}",
            file=sys.stderr,
        )
    elif last.finish_reason != "stop" and sys.stderr.isatty():
        print(f"(ended: {last.finish_reason})", file=sys.stderr)
    return 0


def _prompt(client: Client, text: str, system: str | None, *, raw: bool) -> Prompt:
    if raw or client.tokenizer().chat_template is None:
        if system is not None:
            raise PromptError("a system message needs a model with a chat template, and no --raw")
        return text
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def _stream(client: Client, prompt: Prompt, sampling: SamplingParams) -> Chunk:
    """Print the answer as it comes; return the last chunk."""
    ends_line = True
    chunk: Chunk | None = None
    with closing(client.generate(prompt, sampling)) as chunks:
        for chunk in chunks:
            if chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                ends_line = chunk.text.endswith("\n")
    if not ends_line:
        print(flush=True)
    assert chunk is not None
    return chunk
