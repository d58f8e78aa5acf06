"""Data directories of earlier versions, and the proof that a broker of today opens them.

`written/VERSION/` has what a broker of that version left: `clean.tar.zst` after an orderly stop, `killed.tar.zst` as it
was the moment before, which is what a kill -9 leaves, `seen.json.zst`, what that version itself saw in them when it was
started again, and `said.json.zst`, what its clients and it said to each other.  `python -m tests.compat.write VERSION`
makes them with the code as it is.
"""
