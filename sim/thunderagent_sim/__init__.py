"""Simulated inference engines: a worker to run the demo against, and a fleet to study policies on."""
