"""moto's S3 server with a folder as its bucket, and latency: `python -m benchmarks.s3_server FOLDER [--latency-ms 10]`.

moto closes the connection after every answer and takes several milliseconds of CPU time for one, so with it both
sides are bounded by the server, and nobody's kept-open connections show.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "data"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3_server", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    application = DomainDispatcherApplication(create_backend_app)
    latency_s = 0.0

    def held_back(environ: Any, start_response: Any) -> Iterable[bytes]:
        time.sleep(latency_s)
        return application(environ, start_response)  # type: ignore[no-any-return]

    server = make_server("127.0.0.1", 0, held_back, threaded=True)
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
