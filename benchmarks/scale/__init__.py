"""How Millstream's cost grows with topics, partitions, connections, groups, backlog and the size of messages."""
