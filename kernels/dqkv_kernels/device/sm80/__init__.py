"""The main loop for mma.sync and cp.async: runs on compute capability 8.0 and everything after it."""
