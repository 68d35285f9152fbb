"""The model: loading, packed attention, what launchers do to it, FLOPs and memory."""
