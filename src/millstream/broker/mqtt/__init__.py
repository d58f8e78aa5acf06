"""MQTT in the broker: sessions that outlive connections, retained messages, wills, and who gets what."""
