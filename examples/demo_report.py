"""The demo's tables, its figure and its verdict, all from what the ranks measured."""

import datetime
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

MIB = 1024.0 * 1024.0


def describe_machine() -> dict:
    gpus = torch.cuda.is_available()
    return {
        "gpus": gpus,
        "device": f"{torch.cuda.get_device_name()}, NCCL, bf16" if gpus else f"CPU, {_cores()} cores, gloo, fp32",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def conditions(demo: dict) -> list[str]:
    """Two lines for under the tables and the figure."""
    s, m = demo["settings"], demo["machine"]
    ranks = f"{s['ranks']} ranks" if s["ranks"] > 1 else "1 rank"
    return [
        f"{ranks}; {m['device']}; torch {m['torch']}, Python {m['python']}; {m['date']}",
        f"{s['layers']} layers of width {s['dim']}; {s['batch']} x {s['seq']} bytes per rank and step; "
        f"{s['steps']} steps; {'Z2' if s['z2'] else 'Z3'}; seed {s['seed']}",
    ]


def curve(demo: dict, run: str) -> list[dict]:
    """Validation points of a run: step, seconds of training, loss.  The same on every rank but for the clock."""
    return demo["runs"][run][0]["validation"]


def tokens_per_second(demo: dict, run: str) -> float:
    """All ranks together, without the first interval between validations (it pays for what is made once)."""
    s, points = demo["settings"], curve(demo, run)
    first = points[1] if len(points) > 2 else points[0]
    tokens = (points[-1]["step"] - first["step"]) * s["batch"] * s["seq"] * s["ranks"]
    return tokens / (points[-1]["seconds"] - first["seconds"])


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def ownership_table(demo: dict) -> Table:
    ranks = demo["runs"]["muon"]
    predicted = [1e3 * rank["load"][0] for rank in ranks]
    measured = [rank["matrix_ms"] for rank in ranks]
    table = _table(
        "Who owns what, and what its optimizer step costs",
        "owner", "matrices", "MiB", "predicted\nms (H200)", "predicted\nshare", "measured\nms", "measured\nshare",
        caption="MiB: masters and momentum.\n"
        f"Measured: {'GPU' if demo['machine']['gpus'] else 'CPU'} time of the C++ Muon step, mean over the steps.\n"
        f"Largest over mean: predicted {_max_over_mean(predicted):.3f}, measured {_max_over_mean(measured):.3f}",
    )  # fmt: skip
    for owner, rank in enumerate(ranks):
        _, held, matrices = rank["load"]
        shares = [f"{times[owner] / sum(times):.1%}" for times in (predicted, measured)]
        table.add_row(
            f"rank {owner}", str(matrices), f"{held / MIB:.2f}", f"{predicted[owner]:.3f}", shares[0],
            f"{measured[owner]:.2f}", shares[1],
        )  # fmt: skip
    return table


def _max_over_mean(values: list[float]) -> float:
    return max(values) * len(values) / sum(values)


def loss_table(demo: dict) -> Table:
    table = _table("Validation loss, nats per byte", "step", caption="seconds: of training, without validation")
    for name in demo["names"].values():
        table.add_column(name, justify="right")
        table.add_column("seconds", justify="right", style="dim")
    for points in zip(*(curve(demo, run) for run in demo["names"]), strict=True):
        cells = [cell for point in points for cell in (f"{point['loss']:.4f}", f"{point['seconds']:.1f}")]
        table.add_row(str(points[0]["step"]), *cells)
    return table


def cost_table(demo: dict) -> Table:
    kind = (
        "most bytes allocated on the GPU" if demo["machine"]["gpus"] else "growth of the peak resident set in the run"
    )
    own = [rank["own_memory"] for rank in demo["runs"]["muon"]]
    predicted, counted = (_mib(entry[key] for entry in own) for key in ("predicted", "counted"))
    table = _table(
        "Speed and memory", "run", "tokens/s, all ranks", "peak MiB, by rank",
        caption=f"Peak: {kind}.\ndmuon's own part of it (masters, momentum, copies, buffers, gradients), MiB:\n"
        f"  predicted {predicted}; counted {counted}",
    )  # fmt: skip
    for run, name in demo["names"].items():
        peaks = _mib(rank["peak_bytes"] for rank in demo["runs"][run])
        table.add_row(name, f"{tokens_per_second(demo, run):,.0f}", peaks)
    return table


def _mib(values) -> str:
    return ", ".join(f"{value / MIB:.1f}" for value in values)


def print_report(demo: dict) -> bool:
    """Prints everything; true if Muon reached the lower validation loss."""
    console = Console()
    for table in (ownership_table(demo), loss_table(demo), cost_table(demo)):
        console.print(table)
        console.print()
    console.print("\n".join(conditions(demo)), style="dim", highlight=False)
    adamw, muon = (curve(demo, run)[-1]["loss"] for run in ("adamw", "muon"))
    winner = "dmuon Muon" if muon < adamw else "FSDP2 + AdamW"
    console.print(
        f"{winner} reached the lower validation loss after {demo['settings']['steps']} steps: "
        f"dmuon Muon {muon:.4f}, FSDP2 + AdamW {adamw:.4f} nats per byte",
        style="bold",
    )
    return muon < adamw


def save_figure(demo: dict, path: Path) -> None:
    """Loss against steps and against seconds of training, without the common start, which would flatten the rest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"adamw": {"color": "#D55E00", "marker": "s"}, "muon": {"color": "#0072B2", "marker": "o"}}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, key, unit in zip(axes, ("step", "seconds"), ("step", "seconds of training"), strict=True):
        for run, name in demo["names"].items():
            points = curve(demo, run)[1:]
            axis.plot([p[key] for p in points], [p["loss"] for p in points], label=name, ms=4, **styles[run])
            last = points[-1]
            label = (0, 8) if run == "adamw" else (0, -16)
            axis.annotate(f"{last['loss']:.3f}", (last[key], last["loss"]), label, textcoords="offset points",
                          ha="center", color=styles[run]["color"])  # fmt: skip
        axis.set_xlabel(unit)
        axis.margins(y=0.12)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("validation loss, nats per byte")
    axes[0].legend(frameon=False)
    start = curve(demo, "muon")[0]["loss"]
    figure.suptitle(f"The same small GPT, the same batches; both runs start at {start:.2f}", fontsize=11)
    figure.supxlabel("\n".join(conditions(demo)), fontsize=8, color="0.35")
    figure.savefig(path, dpi=150)
    plt.close(figure)
