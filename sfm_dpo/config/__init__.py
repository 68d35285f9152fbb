"""The configuration: its fields, their checks, and what each of them affects."""
