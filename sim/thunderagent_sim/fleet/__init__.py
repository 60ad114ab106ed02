"""The simulated fleet: the real classifier and selector over simulated engines, in simulated time (fleet.md)."""
