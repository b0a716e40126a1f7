"""Comparison with other libraries: `python -m bench.peers`.

Every method gets the same trained model and data, in a separate process. `docs/peers.md` lists the settings of each
peer, with reasons.
"""
