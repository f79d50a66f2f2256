"""Credentials that botocore, if it is installed, finds: instance and container roles, SSO, web identities."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch_dpflow.datasets.storage.credentials import Credentials

#: Seconds between two look-ups: each may wait for servers that do not exist, and reading a forbidden object must not
#: cause one each time.
_LOOK_UP_AGAIN_S = 60.0


class BotocoreChain:
    """Credentials of botocore's chain, which it renews before they expire. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Any = None
        self._looked_up: float | None = None

    def get(self) -> Credentials | None:
        """The valid credentials. Raises ConnectionError if they cannot be renewed."""
        if self._looked_up is None:
            with self._lock:
                if self._looked_up is None:
                    self._look_up()
        if self._found is None:
            return None
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception as error:
            raise ConnectionError(f"the credentials could not be renewed: {error}") from error
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def renew(self) -> None:
        """Look them up again, unless that was done lately."""
        with self._lock:
            if self._looked_up is None or time.monotonic() - self._looked_up >= _LOOK_UP_AGAIN_S:
                self._look_up()

    def _look_up(self) -> None:
        try:
            import botocore.session
        except ImportError:
            pass
        else:
            self._found = botocore.session.get_session().get_credentials()
        self._looked_up = time.monotonic()
