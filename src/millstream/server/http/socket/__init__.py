"""WebSocket: subscribe, lease, settle and publish over one connection.

`frames` says what is said, `mailbox` keeps what a subscriber has not read yet; both do no I/O.  `conversation`
carries out what a client asks for, `door` lets it in.
"""
