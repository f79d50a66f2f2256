"""As much of an FTP server as fsspec's client asks for, on a real socket, with files in memory."""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from posixpath import basename, dirname


class FTPServer:
    """Serves `files`, by absolute path, to one user, in a `with` statement."""

    def __init__(self, user: str, password: str) -> None:
        self.login = (user, password)
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self._tcp = _Server(("127.0.0.1", 0), _Session)
        self._tcp.owner = self
        self._thread = threading.Thread(target=self._tcp.serve_forever, args=(0.02,), name="ftp-server")

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._tcp.server_address[1]}"

    def __enter__(self) -> FTPServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tcp.shutdown()
        for session in list(self._tcp.sessions):
            with suppress(OSError):  # it has gone
                session.shutdown(socket.SHUT_RDWR)
        self._tcp.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    owner: FTPServer

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.sessions: set[socket.socket] = set()


class _Session(socketserver.StreamRequestHandler):
    server: _Server
    disable_nagle_algorithm = True
    user = ""
    start = 0
    passive: socket.socket | None = None
    renamed = ""

    def handle(self) -> None:
        self.server.sessions.add(self.request)
        self._say("220 ready")
        while line := self.rfile.readline():
            command, _, argument = line.decode().rstrip("\r\n").partition(" ")
            answer = getattr(self, f"do_{command.lower()}", None)
            self._say(answer(argument) if answer is not None else "502 not known here")

    def finish(self) -> None:
        self.server.sessions.discard(self.request)
        if self.passive is not None:
            self.passive.close()
        super().finish()

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())

    def do_user(self, name: str) -> str:
        self.user = name
        return "331 and the password"

    def do_pass(self, password: str) -> str:
        return "230 welcome" if (self.user, password) == self.server.owner.login else "530 no"

    def do_type(self, _: str) -> str:
        return "200 yes"

    def do_pasv(self, _: str) -> str:
        if self.passive is not None:
            self.passive.close()
        self.passive = socket.create_server(("127.0.0.1", 0))
        high, low = divmod(self.passive.getsockname()[1], 256)
        return f"227 (127,0,0,1,{high},{low})"

    def do_rest(self, start: str) -> str:
        self.start = int(start)
        return "350 from there"

    def do_mlsd(self, path: str) -> str:
        folder = "/" + path.strip("/")
        files = self.server.owner.files
        lines = [
            f"type=file;size={len(data)}; {basename(name)}\r\n"
            for name, data in files.items()
            if dirname(name) == folder
        ]
        below = {name[len(folder.rstrip("/")) + 1 :] for name in files if name.startswith(folder.rstrip("/") + "/")}
        made = {basename(name) for name in self.server.owner.folders - {"/"} if dirname(name) == folder}
        made |= {rest.split("/")[0] for rest in below if "/" in rest}
        lines += [f"type=dir; {name}\r\n" for name in made]
        return self._transfer("".join(lines).encode())

    def do_retr(self, path: str) -> str:
        data = self.server.owner.files.get("/" + path.strip("/"))
        start, self.start = self.start, 0
        return "550 no such file" if data is None else self._transfer(data[start:])

    def do_stor(self, path: str) -> str:
        self.start = 0
        if dirname("/" + path.strip("/")) not in self.server.owner.folders:
            return "553 there is no such directory"
        self._say("150 go on")
        connection = self._connection()
        with connection, connection.makefile("rb") as file:
            self.server.owner.files["/" + path.strip("/")] = file.read()
        return "226 done"

    def do_rnfr(self, path: str) -> str:
        self.renamed = "/" + path.strip("/")
        return "350 to what" if self.renamed in self.server.owner.files else "550 no such file"

    def do_rnto(self, path: str) -> str:
        self.server.owner.files["/" + path.strip("/")] = self.server.owner.files.pop(self.renamed)
        return "250 done"

    def do_mkd(self, path: str) -> str:
        self.server.owner.folders.add("/" + path.strip("/"))
        return f'257 "{path}"'

    def do_abor(self, _: str) -> str:
        return "226 done"

    def _transfer(self, data: bytes) -> str:
        self._say("150 it comes")
        with self._connection() as connection, suppress(OSError):  # a client that has enough goes away
            connection.sendall(data)
        return "226 done"

    def _connection(self) -> socket.socket:
        assert self.passive is not None
        connection, _ = self.passive.accept()
        self.passive.close()
        return connection
