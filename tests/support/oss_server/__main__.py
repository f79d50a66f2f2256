"""Serve one bucket until interrupted; print the endpoint first.

python -m tests.support.oss_server --bucket data [--folder ./images] [--latency-ms 10]
"""

import argparse
import signal
from pathlib import Path

from tests.support.oss_server import OSSServer, StoredObject


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.oss_server", description=__doc__)
    parser.add_argument("--bucket", default="data")
    parser.add_argument("--folder", type=Path, help="put every file below it into the bucket")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with OSSServer(latency_s=arguments.latency_ms / 1e3, port=arguments.port) as server:
        server.buckets.create(arguments.bucket)
        if arguments.folder is not None:
            load(server, arguments.bucket, arguments.folder)
        print(server.endpoint, flush=True)
        signal.sigwait(ends)


def load(server: OSSServer, bucket: str, folder: Path) -> None:
    """Put every file below `folder` into `bucket`, under its path from there."""
    for path in folder.rglob("*"):
        if path.is_file():
            stored = StoredObject(data=path.read_bytes(), content_type="application/octet-stream")
            server.buckets.put(bucket, path.relative_to(folder).as_posix(), stored)


if __name__ == "__main__":
    main()
