"""Servers on the nodes of a cluster as the devices of one front: one address, and an engine that keeps workers alive.

Each worker is a whole server of ours on its node, with one device, started and restarted by the cluster's engine
(Ray). The front is a whole server, too, whose devices are those workers: what it does for a device of its own machine
(placement by predicted queue seconds, fairness, deadlines, drain, metrics, typed errors) it does for them, and nothing
of that is written twice. Tensors travel by our own wire, in frames of a megabyte into their place, with checksums; by
Ray's object store they would be copied twice more, be pickled, and have to fit into it.

What this costs: every tensor passes the front, whole, before it goes on to a worker, and a worker has one request at a
time, its bytes on the way included. Where callers can go round several addresses (deploy/README.md), that is faster.
"""
