"""Launchers, which start and stop workers on a platform: the contract, and modules for each platform.

`torch_dpflow.remote` exports the classes of settings.
"""
