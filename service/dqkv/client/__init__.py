"""The client: asks a server for gradients, over numpy arrays or torch tensors."""
