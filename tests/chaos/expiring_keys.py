"""Samples in an S3 whose keys expire every few seconds, while workers that read them are killed."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests.datasets.storage.signed_s3 import SignedS3
from tests.datasets.storage.web_server import WebServer
from tests.shared_datasets import HeldUp
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage.credentials import Credentials

#: Bytes of a sample: its number.
_WIDTH = 4
_DATASET = "core/numbers"


class ExpiringKeys:
    """An S3 of numbered samples, and a file with its keys, which are renewed shortly before they expire.

    Use it in a `with` statement.

    Args:
        folder: where the file of keys and the store lie.
        lifetime_s: of a key. The next one is in the file for the last quarter of it.
    """

    def __init__(self, folder: Path, size: int, *, lifetime_s: float) -> None:
        data = b"".join(number.to_bytes(_WIDTH, "big") for number in range(size))
        self.file = folder / "keys"
        self.store = str(folder / "store")
        self._lifetime_s = lifetime_s
        self._s3 = SignedS3(data, _keys(0))
        self._next = SignedS3(data, _keys(0))
        self._server = WebServer(self._answer)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="expiring-keys")
        #: keys that have expired, and requests that were made with one of those
        self.expired = self.refused = 0
        draft = Draft(DatasetStore.create(self.store), _DATASET, "v1")
        items = [Item(path="all", offset=_WIDTH * number, length=_WIDTH) for number in range(size)]
        draft.add("train", IterableImporter(items, root="s3://data"))
        draft.publish()

    @property
    def endpoint(self) -> str:
        return self._server.url

    def __enter__(self) -> ExpiringKeys:
        self._write(_keys(0))
        self._server.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._server.__exit__()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        signed = handler.headers.get("Authorization", "")
        if f"={self._next.accepted.key_id}/" in signed:
            return self._next(handler)
        self.refused += f"={self._s3.accepted.key_id}/" not in signed
        return self._s3(handler)

    def _renew(self) -> None:
        for number in count(1):
            if self._is_over.wait(0.75 * self._lifetime_s):
                return
            self._next.accepted = _keys(number)  # before anybody can know it
            self._write(_keys(number))
            if self._is_over.wait(0.25 * self._lifetime_s):
                return
            self._s3.accepted = _keys(number)
            self.expired = number

    def _write(self, keys: Credentials) -> None:
        draft = self.file.with_name("draft")
        draft.write_text(
            f"[default]\naws_access_key_id={keys.key_id}\naws_secret_access_key={keys.secret}\n"
            f"aws_session_token={keys.token}\n"
        )
        os.replace(draft, self.file)


class Stored(HeldUp):
    """As `HeldUp`, and each sample is read from such a store."""

    def __init__(self, size: int, cost_s: float, folder: str, *, store: str, endpoint: str) -> None:
        super().__init__(size, cost_s, folder)
        self.store, self.endpoint = store, endpoint
        self._reader: DatasetReader | None = None

    def __getitem__(self, index: int) -> Any:
        if self._reader is None:
            stored = DatasetStore(self.store).open(_DATASET)
            self._reader = DatasetReader(stored, storage_options={"endpoint": self.endpoint})
        _, key = super().__getitem__(index)
        data, _ = self._reader[index]
        return torch.full((self.width,), float(int.from_bytes(data, "big"))), key


def _keys(number: int) -> Credentials:
    return Credentials(f"key-{number}", f"secret-{number}", f"token-{number}")
