"""The partition log: append-only files, synchronous, one writer; knows nothing of asyncio or of the network."""
