"""Who may do what, how fast, and how much: pure decisions about keys, roles, scopes, rates and quotas.

Nothing here knows a socket, a file or the time; the broker's room of the same name brings them.
"""
