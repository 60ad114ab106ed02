"""Benchmarks that print tables and keep JSON: ``python -m bench [NAME]``."""
