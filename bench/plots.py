"""Pictures of the benchmarks of whole steps.  matplotlib is imported when one is drawn: ImportError without it."""

from itertools import cycle
from pathlib import Path
from typing import Any

from step_profile import PHASES


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_steps(setup: dict[str, Any], shapes: dict[str, dict[str, Any]], path: Path) -> None:
    plt = pyplot()
    colours = dict(zip(PHASES, ("#4878a8", "#7aa974", "#d1603d"), strict=True))
    figure, axes = plt.subplots(1, len(shapes), figsize=(1.5 + 4.5 * len(shapes), 4.2), squeeze=False)
    for axis, (shape, result) in zip(axes[0], shapes.items(), strict=True):
        rows = result["contenders"]
        bottom = [0.0] * len(rows)
        for phase in PHASES:
            heights = [row[f"{phase}_ms"] for row in rows.values()]
            axis.bar(list(rows), heights, bottom=bottom, label=phase, color=colours[phase], width=0.7)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for x, (top, row) in enumerate(zip(bottom, rows.values(), strict=True)):
            ratio = f"\n{row['ratio_to_adamw']:.2f}x" if "ratio_to_adamw" in row else ""
            axis.text(x, top, f"{row['step_ms']:.1f}{ratio}", ha="center", va="bottom", fontsize=8)
        axis.set_ylim(0, 1.18 * max(bottom))
        axis.set_title(f"{shape} tokens a rank", loc="left", fontsize=10)
        axis.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right", fontsize=8)
    axes[0][0].set_ylabel("ms a step (medians of the phases)")
    figure.suptitle(f"{setup['parameters'] / 1e6:.0f} M parameters, {setup['ranks']} x {setup['device']}", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(PHASES), fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)


MUON, ADAMW = "#d1603d", "#4878a8"
LINES = {"z3": "-", "z2": "--"}
MARKERS = "osD^v<>PXph*"
PANELS = ("a step, ms", "largest owner's update, ms", "dmuon's bytes on the wire, MiB a rank and step")
Values = tuple[float | None, ...]
"""One for each of PANELS; None: not there."""


def predicted_values(row: dict[str, Any]) -> dict[str, Values]:
    """By whose they are."""
    wire = sum(row["wire_bytes"].values()) / 2**20
    return {"Muon": (row.get("step_ms"), row["largest_ms"], wire), "AdamW": (row.get("adamw_step_ms"), None, None)}


def measured_values(row: dict[str, Any], tokens: str) -> dict[str, Values]:
    """By contender."""
    values = {}
    for name, figures in row["tokens"][tokens]["contenders"].items():
        of = row["dmuon"].get(name)
        owner = of and of["owners"]["measured"]["largest_ms"]
        wire = of and sum(of["wire"]["counted"].values()) / row["ranks"] / 2**20
        values[name] = (figures["step_ms"], owner, wire)
    return values


def draw_series(axes: Any, points: list[tuple[int, Values]], style: dict[str, Any]) -> None:
    """points: place on the x axis, values."""
    for panel, axis in enumerate(axes):
        there = [(x, values[panel]) for x, values in sorted(points) if values[panel] is not None]
        if there:
            axis.plot(*zip(*there, strict=True), **style)


def draw_preset(axes: Any, predicted: list[dict[str, Any]], measured: list[dict[str, Any]], tokens: str) -> None:
    """Meshes stand side by side, in the order of their ranks, shard only first."""
    ranks = {row["mesh"]: row["ranks"] for row in [*predicted, *measured]}
    places = {mesh: x for x, mesh in enumerate(sorted(ranks, key=lambda mesh: (ranks[mesh], "x" in mesh, mesh)))}
    lines: dict[tuple[str, str], list[tuple[int, Values]]] = {}
    for row in predicted:
        for who, values in predicted_values(row).items():
            lines.setdefault((who, row["mode"]), []).append((places[row["mesh"]], values))
    for (who, mode), points in lines.items():
        style = {"linestyle": LINES[mode], "marker": ".", "label": f"{who} {mode}, predicted"}
        draw_series(axes, points, style | {"color": MUON if who == "Muon" else ADAMW})
    dots: dict[str, list[tuple[int, Values]]] = {}
    for row in measured:
        for name, values in measured_values(row, tokens).items():
            dots.setdefault(name, []).append((places[row["mesh"]], values))
    for (name, points), marker in zip(dots.items(), cycle(MARKERS), strict=False):
        colour = MUON if name.startswith("muon") else ADAMW
        draw_series(axes, points, {"color": colour, "marker": marker, "linestyle": "", "label": name})
    for axis, title in zip(axes, PANELS, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xticks(range(len(places)), list(places), fontsize=8)
        axis.set_xlabel("mesh: ranks, or replicas x ranks of one", fontsize=8)
        axis.set_ylim(bottom=0)


def draw_scaling(files: list[dict[str, Any]], tokens: str, path: Path) -> None:
    """A row of panels for each preset in the files: predictions are lines, measurements are points."""
    plt = pyplot()
    parameters = {file["setup"]["preset"]: file["setup"]["parameters"] for file in files}
    figure, grid = plt.subplots(len(parameters), len(PANELS), figsize=(15, 4.2 * len(parameters)), squeeze=False)
    for axes, preset in zip(grid, parameters, strict=True):
        mine = [file for file in files if file["setup"]["preset"] == preset]
        predicted = [row for file in mine if file.get("tokens") == tokens for row in file["predicted"]]
        measured = [row for file in mine for row in file.get("measured", []) if tokens in row["tokens"]]
        draw_preset(axes, predicted, measured, tokens)
        axes[0].set_title(f"{parameters[preset] / 1e6:.0f} M parameters: {PANELS[0]}", loc="left", fontsize=10)
    figure.suptitle(f"{tokens} tokens a rank; lines: predicted, points: measured", fontsize=10)
    put_legend(figure, grid.flat)
    figure.tight_layout(rect=(0, 0.1 / len(parameters), 1, 1))
    figure.savefig(path, dpi=130)


def put_legend(figure: Any, axes: Any) -> None:
    """Below all panels, each name once."""
    entries = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=5, fontsize=8)
