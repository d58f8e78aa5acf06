"""The MQTT door: bytes from a socket become packets for the broker, what it answers becomes bytes.  Nothing else.

`connection` is one client, `door` what the clients of one way in share, `deadlines` when to look after whom.  There are
two ways in: a port of its own (`listener`), and a path of the HTTP port (`websocket`).
"""
