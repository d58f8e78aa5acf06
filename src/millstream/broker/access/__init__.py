"""Access at run time: keys, who may make which call, quotas and the audit log."""
