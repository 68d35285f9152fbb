"""The model: loading, packed attention, sharding and FLOPs."""
