"""MQTT against Mosquitto and amqtt: see `__main__`."""
