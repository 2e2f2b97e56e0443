"""Devices and the processes that own them: a problem whose tensors lie in blocks goes in, a report comes back."""
