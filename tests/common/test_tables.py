"""Tables in plain text."""

from sfm_dpo.common.files import format_table


def test_columns_are_aligned_and_short_rows_are_filled():
    table = format_table([(1, "ab", "x"), (100, "c")], ("n", "name"), align="rl")
    assert table == "    n  name\n    1  ab    x\n  100  c"
    assert format_table([("a", 1), ("bb", 20)], align="lr", indent=0) == "a    1\nbb  20"
    assert format_table([]) == ""
