"""`splitserve chat`: a conversation in the terminal, or with what is piped into it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from cluster.client.api_client import DEFAULT_URL, KEY_VARIABLE, ApiClient, key_headers, server_url
from cluster.client.chat import Chat
from cluster.user_error import UserError

_HELP = "/reset forgets the conversation, /system TEXT tells the model what it is, /exit (or Ctrl-D) ends"
_PROMPT = "> "


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """The options of `splitserve chat`."""
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told before everything else")
    parser.add_argument("--max-tokens", type=int, help="of each answer; default: the server's")
    parser.add_argument("--temperature", type=float, help="0: the likeliest words; default: the model's or server's")
    parser.add_argument(
        "--api-key-env",
        default=KEY_VARIABLE,
        metavar="NAME",
        help=f"environment variable that holds the API key, if the server wants one; default: {KEY_VARIABLE}",
    )


def run_chat(options: argparse.Namespace) -> int:
    """Until the input ends or says /exit. 0: every question was answered. Raises UserError if the server can't be
    reached at all; what fails later is told, and the conversation goes on."""
    client = ApiClient(server_url(options.url), key_headers(options.api_key_env))
    model = options.model or client.model()
    chat = Chat(client, model, options.max_tokens, temperature=options.temperature)
    chat.set_system(options.system)
    is_typed = sys.stdin.isatty()
    if is_typed:
        print(f"{model} at {client.url}\n{_HELP}")
    num_failed = 0
    for line in _lines(sys.stdin, is_typed):
        match line.split(maxsplit=1):
            case []:
                continue
            case ["/exit" | "/quit"]:
                break
            case ["/reset"]:
                chat.reset()
                print("(the conversation begins anew)")
            case ["/system", *text]:
                chat.set_system("".join(text).strip())
                print("(the conversation begins anew)")
            case [command, *_] if command.startswith("/"):
                print(f"unknown command {command}: {_HELP}", file=sys.stderr)
            case _:
                num_failed += not _answered(chat, line)
    return 1 if num_failed else 0


def _answered(chat: Chat, line: str) -> bool:
    """Whether the answer came whole. It is printed as it comes."""
    try:
        speed = chat.ask(line, lambda piece: print(piece, end="", flush=True))
    except UserError as error:
        print(flush=True)
        print(error, file=sys.stderr)
        return False
    except KeyboardInterrupt:  # of the answer, not of the conversation
        print("\n(interrupted; not kept)", flush=True)
        return True
    print(f"\n({speed})", flush=True)
    return True


def _lines(stream: TextIO, is_typed: bool) -> Iterator[str]:
    """What is typed, with the terminal's line editing, or what is piped in."""
    if not is_typed:
        yield from (line.rstrip("\n") for line in stream)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` edits with it
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return
