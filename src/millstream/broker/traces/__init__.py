"""What has happened to messages: noting it, keeping it, and finding it again."""
