"""Queue groups at run time: ledgers meet logs, journals, consumers and time."""
