#!/usr/bin/env python
"""Makes report.png (with chromium) and healthy-collapsed.png: python docs/images/make.py HEALTHY COLLAPSED

HEALTHY is the run of `make demo`. COLLAPSED: python train_dpo.py --config recipes/demo.yaml --learning_rate 3e-4 \\
    --guard warn --output_dir outputs/demo-collapsed
"""

import subprocess
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from sfm_dpo.report.plots import COLORS, PANELS, STYLE
from sfm_dpo.run.reader import read_run

HERE = Path(__file__).resolve().parent


def main(healthy: Path, collapsed: Path) -> None:
    page = ["--window-size=1100,1310", f"--screenshot={HERE / 'report.png'}", (healthy / "report.html").as_uri()]
    subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", *page], check=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.9, 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, 3), ("loss", "margin", "entropy"), strict=True):
            title, metrics, unit = PANELS[name]
            for run, color in ((healthy, COLORS[2]), (collapsed, COLORS[1])):
                log = [(e["step"], e[metric]) for e in read_run(run)["log"] for metric in metrics if metric in e]
                axes.plot(*zip(*log, strict=True), color=color, label="healthy" if run is healthy else "collapsed")
            axes.set(title=title, xlabel="optimizer step", ylabel=unit)
        figure.axes[0].legend()
        figure.savefig(HERE / "healthy-collapsed.png", facecolor="white")


if __name__ == "__main__":
    main(*(Path(word).resolve() for word in sys.argv[1:]))
