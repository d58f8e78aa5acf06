"""MQTT 3.1.1 and 5 without sockets: packets, topics, handshakes and what is remembered of a client.  Pure."""
