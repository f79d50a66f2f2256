"""What starts and stops workers on a platform: `contract` has the contract, each other module serves one platform.

`torch_dpflow.remote` exports the classes of settings.
"""
