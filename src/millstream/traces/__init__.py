"""What has happened to messages, as values: records of events, and the passport that is made of them."""
