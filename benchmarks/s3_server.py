"""moto's S3 server with a folder as its bucket, and latency: `python -m benchmarks.s3_server FOLDER [--latency-ms 10]`.

moto is a WSGI application, and the server that it comes with closes the connection after every answer, which S3 does
not do. So it runs behind a front that keeps connections open, for both sides alike. An answer still costs it about
two milliseconds of processor time, which bounds what can be read from it.
"""

from __future__ import annotations

import argparse
import io
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import run_wsgi_app

BUCKET = "data"
#: Headers of an answer that say how it is sent, which is this server's to decide.
_FRAMING = {"connection", "content-length", "transfer-encoding"}


class KeepAliveHandler(WSGIRequestHandler):
    """Answers one request after the other on a connection.

    werkzeug's own handler cannot: it does not know how much of a request the application has left unread. This one
    reads requests whole, before it asks the application.
    """

    protocol_version = "HTTP/1.1"
    # An answer's head and body are two writes; on an open connection Nagle's algorithm would hold the second one back.
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        environ = self.make_environ()
        environ["wsgi.input"] = io.BytesIO(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        parts, status, headers = run_wsgi_app(self.server.app, environ)
        body = b"".join(parts)
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            if name.lower() not in _FRAMING:
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3_server", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    application = create_backend_app("s3")
    latency_s = 0.0

    def held_back(environ: Any, start_response: Any) -> Any:
        time.sleep(latency_s)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, held_back, threaded=True, request_handler=KeepAliveHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    _load(endpoint, arguments.folder)
    latency_s = arguments.latency_ms / 1e3
    print(endpoint, flush=True)
    signal.sigwait(ends)
    server.shutdown()


def _load(endpoint: str, folder: Path) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test-key-id",
        aws_secret_access_key="test-secret",
    )
    client.create_bucket(Bucket=BUCKET)
    for path in folder.rglob("*"):
        if path.is_file():
            # Readable without a signature too: webdataset has none.
            name = path.relative_to(folder).as_posix()
            client.put_object(Bucket=BUCKET, Key=name, Body=path.read_bytes(), ACL="public-read")


if __name__ == "__main__":
    main()
