"""The main loop for tcgen05 and tensor memory: compiled, checked on the host, not yet run on its own hardware."""
