"""The table of parity.py: a line a variant."""

from typing import Any

from sfm_dpo.rounding import FACTOR


def as_text(result: dict[str, Any]) -> str:
    """What was computed, the rounding that was measured, the variants, and the layers that are farthest off."""
    tokens, steps = result["tokens"], result["steps"]
    lines = [
        f"{result['model']} on {result['device']}: {result['pairs']} pairs, sequences of {min(tokens)} to "
        f"{max(tokens)} tokens, {result['response_tokens']:,} response tokens",
        f"reference: eager, fp32, padded, one forward: {result['reference']['verdict']}",
    ]
    if result["reference"]["verdict"] == "bug":
        lines[-1] += f": {result['reference']['why']}"
    for dtype, level in result["levels"].items():
        gradient = f", gradient {level['gradient']:.1e} of its norm" if "gradient" in level else ""
        lines.append(
            f"rounding of {dtype}: log-probs max {level['max']:.1e}, mean {level['mean']:.1e} nats a token{gradient}"
        )
    after = f"after {steps} step{'s' * (steps != 1)}"
    head = ["variant", "logp max", "logp mean", "grad norm", "cosine", after, "step 0", "x rounding", "verdict"]
    rows = [head]
    for row in result["variants"]:
        if row["verdict"] == "skipped" or "logps" not in row:
            rows.append([row["variant"], *["-"] * 7, f"{row['verdict']}: {row['why']}"])
            continue
        gradient = row.get("gradient")
        rows.append(
            [
                row["variant"],
                f"{row['logps']['max']:.1e}",
                f"{row['logps']['mean']:.1e}",
                f"{gradient['norm']:.5g}" if gradient else "-",
                f"{gradient['cosine']:.6f}" if gradient else "-",
                f"{row['after']['max']:.1e}" if "after" in row else "-",
                f"{row['step_0']:.1e}" if "step_0" in row else "-",
                f"{row['times_rounding']:,.1f}",
                row["verdict"] + (f": {row['why']}" if row["verdict"] == "bug" else ""),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines.append("")
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]))
    lines.append("")
    lines.append(
        "logp: nats a token against the reference; cosine: of the gradient in the layer farthest off; step 0: how far "
        f"the loss is from ln 2 with a\nreference cache made by eager in the same precision; a bug: over {FACTOR:g} "
        "times rounding, or a token that should not count"
    )
    for row in result["variants"]:
        if row["verdict"] == "bug" and "gradient" in row:
            layers = row["gradient"]["layers"]
            shown = "; ".join(
                f"{name} norm {layer['norm']:.4g} ({layer['expected_norm']:.4g}), cosine {layer['cosine']:.4f}"
                for name, layer in layers.items()
            )
            lines.append(f"{row['variant']}, gradient by layer: {shown}")
    return "\n".join(lines)
