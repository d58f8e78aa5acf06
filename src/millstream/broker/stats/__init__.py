"""How the broker is doing: one pass over what it holds in memory, shown as an overview, as metrics and as history."""
