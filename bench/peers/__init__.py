"""Side by side with the peers: `python -m bench.peers`.

Every method sees the same trained model and the same data, in a process of its own. `docs/peers.md` says which settings
each peer is given, and why.
"""
