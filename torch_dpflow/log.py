"""Logger names, so that a user can turn one part up or down: `logging.getLogger("torch_dpflow.worker")`."""

import logging

#: What happens in the training process: workers that died, windows that grew.
LOADER = logging.getLogger("torch_dpflow.loader")

#: What happens inside a worker.
WORKER = logging.getLogger("torch_dpflow.worker")

#: Samples that a flow leaves out because they cannot be loaded.
FLOWS = logging.getLogger("torch_dpflow.flows")

#: Connections, malformed messages, retries.
TRANSPORT = logging.getLogger("torch_dpflow.transport")
