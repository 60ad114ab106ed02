"""Pure admission and placement decisions: no I/O, no clock, no logging; single-threaded by contract."""
