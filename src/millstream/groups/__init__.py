"""Stream groups: membership, generations, assignment, committed offsets.  Pure: time is an argument.

`core` decides, `ownership` keeps two members from holding one partition, `assignors` deals partitions out,
`sessions` knows who is late, `offsets` how far a group has read, `documents` how a group is stored.
"""
