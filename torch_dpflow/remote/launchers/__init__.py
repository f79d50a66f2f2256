"""Launchers start and stop workers on a platform: `contract` has the contract, each other module serves one platform.

`torch_dpflow.remote` exports the classes of settings.
"""
