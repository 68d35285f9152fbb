"""The model: loading, packed attention, sharding, FLOPs and memory."""
