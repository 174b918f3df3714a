"""An SMTP server that keeps its mail."""

from __future__ import annotations

import asyncio
import base64
import email.policy
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from email.message import EmailMessage

PASSWORD = "mail-pass-9931"


class SmtpServer:
    """An SMTP server that keeps its mail. `refusals` are answers to the next messages, `hang` holds all of them up."""

    def __init__(self) -> None:
        self.mail: list[tuple[str, list[str], EmailMessage]] = []
        self.logins: list[tuple[str, str]] = []
        self.refusals: list[str] = []
        self.hang: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender, to = "", list[str]()

        def answer(line: str) -> None:
            writer.write(f"{line}\r\n".encode())

        try:
            answer("220 mail.example.org ESMTP")
            while line := (await reader.readline()).decode().strip():
                word, _, rest = line.partition(" ")
                match word.upper():
                    case "EHLO" | "HELO":
                        answer("250-mail.example.org")
                        answer("250 AUTH PLAIN LOGIN")
                    case "AUTH":
                        await self._log_in(rest, reader, writer)
                    case "MAIL":
                        self.reached.set()
                        if self.hang is not None:
                            await self.hang.wait()
                        if self.refusals:
                            answer(self.refusals.pop())
                            continue
                        sender, to = rest.partition("<")[2].partition(">")[0], []
                        answer("250 ok")
                    case "RCPT":
                        to.append(rest.partition("<")[2].partition(">")[0])
                        answer("250 ok")
                    case "DATA":
                        answer("354 go on")
                        self.mail.append((sender, to, await _message(reader)))
                        answer("250 kept")
                    case "QUIT":
                        answer("221 bye")
                        break
                    case _:
                        answer("250 ok")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _log_in(self, rest: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, _, first = rest.partition(" ")
        if kind.upper() == "PLAIN":
            _, user, password = base64.b64decode(first).decode().split("\0")
        else:
            user = base64.b64decode(first).decode()
            if not first:
                writer.write(b"334 VXNlcm5hbWU6\r\n")
                user = base64.b64decode(await reader.readline()).decode()
            writer.write(b"334 UGFzc3dvcmQ6\r\n")
            password = base64.b64decode(await reader.readline()).decode()
        self.logins.append((user, password))
        writer.write(b"235 welcome\r\n" if password == PASSWORD else b"535 no\r\n")

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            if self.hang is not None:
                self.hang.set()
            server.close()


async def _message(reader: asyncio.StreamReader) -> EmailMessage:
    lines: list[bytes] = []
    while (line := await reader.readline()) != b".\r\n":
        lines.append(line[1:] if line.startswith(b"..") else line)
    return email.message_from_bytes(b"".join(lines), policy=email.policy.default)
