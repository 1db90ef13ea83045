"""Measurements behind the claims in README and docs: ``python -m benchmarks NAME [--json]``."""
