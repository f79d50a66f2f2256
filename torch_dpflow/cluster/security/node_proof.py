"""How a node that joins a cluster proves that it may run its services: by the key with which these listen."""

from __future__ import annotations

import hashlib
import hmac

from torch_dpflow.cluster.security.connection_file import ConnectionFile


def node_proof(keys: ConnectionFile, name: str) -> str:
    """What only a process with the cluster's server key can say of a node of this name, 64 hexadecimal digits.

    It is sent through a connection that is encrypted for that key. So whoever has a job's file, which lacks the key,
    can neither make one nor read another's. Raises OptionError for such a file.
    """
    secret = keys.server_keys().secret
    return hmac.new(secret, b"dpflow node " + name.encode(), hashlib.sha256).hexdigest()


def is_proved(keys: ConnectionFile, name: str, proof: str) -> bool:
    """Whether `proof` is that of a process with this cluster's server key."""
    return hmac.compare_digest(node_proof(keys, name).encode(), proof.encode())
