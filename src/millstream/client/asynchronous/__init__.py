"""The asynchronous client: the same names as the synchronous one, for `await` and `async for`."""
