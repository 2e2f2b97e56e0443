"""Memory that processes share: blocks, staging pools, regions and their leases."""
