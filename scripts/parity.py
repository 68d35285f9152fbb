import _removed  # noqa: F401
