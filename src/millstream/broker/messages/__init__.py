"""Looking at messages without consuming them."""
