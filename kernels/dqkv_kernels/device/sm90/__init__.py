"""The main loop for wgmma: runs on compute capability 9.0 alone."""
