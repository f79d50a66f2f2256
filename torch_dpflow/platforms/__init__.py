"""Where processes run: `base` has the contract, each other module an implementation."""
