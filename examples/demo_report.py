"""The demo's tables, its figure and its verdict, all from what the ranks measured."""

import datetime
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

MIB = 1024.0 * 1024.0


def describe_machine() -> dict[str, str]:
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()} (one per rank), NCCL, bf16"
    else:
        device = f"CPU, {len(os.sched_getaffinity(0))} cores shared by the ranks, gloo, fp32"
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def conditions(demo: dict) -> str:
    """One line under every figure and table."""
    s, m = demo["settings"], demo["machine"]
    mode = "Z2" if s["z2"] else "Z3"
    return (
        f"{s['ranks']} ranks, {m['device']}; torch {m['torch']}, Python {m['python']}, {m['date']}; "
        f"{s['layers']} layers of width {s['dim']}, {s['batch']} x {s['seq']} bytes per rank and step, "
        f"{s['steps']} steps, {mode}, seed {s['seed']}"
    )


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
    clock = "GPU time" if "NCCL" in demo["machine"]["device"] else "CPU time of the rank's thread"
    table = _table(
        "Who owns what, and what its optimizer step costs",
        "owner", "matrices", "MiB of master\nand momentum", "predicted\nms (H200)", "predicted\nshare",
        "measured\nms per step", "measured\nshare",
        caption=f"measured: {clock} in the C++ Muon step, mean over the run. "
        f"max/mean: predicted {_max_over_mean(predicted):.3f}, measured {_max_over_mean(measured):.3f}",
    )  # fmt: skip
    for owner, rank in enumerate(ranks):
        _, held, matrices = rank["load"]
        table.add_row(
            f"rank {owner}", str(matrices), f"{held / MIB:.2f}", f"{predicted[owner]:.3f}",
            f"{predicted[owner] / sum(predicted):.1%}", f"{measured[owner]:.2f}",
            f"{measured[owner] / sum(measured):.1%}",
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
    on_gpu = "NCCL" in demo["machine"]["device"]
    counted = "torch.cuda.max_memory_allocated" if on_gpu else "growth of the peak resident set while building and training"
    own = [rank["own_memory"] for rank in demo["runs"]["muon"]]
    table = _table(
        "Speed and memory", "run", "tokens/s,\nall ranks", "peak MiB of ranks 0 to " + str(len(own) - 1),
        caption=f"peak: {counted}.\ndmuon's own share of it (masters, momentum, copies, buffers, gradients), MiB: planned "
        f"{_mib(entry['predicted'] for entry in own)}; counted {_mib(entry['counted'] for entry in own)}",
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
    console.print(conditions(demo), style="dim")
    adamw, muon = (curve(demo, run)[-1]["loss"] for run in ("adamw", "muon"))
    winner = "dmuon Muon" if muon < adamw else "FSDP2 + AdamW"
    console.print(
        f"{winner} reached the lower validation loss after {demo['settings']['steps']} steps: "
        f"dmuon Muon {muon:.4f}, FSDP2 + AdamW {adamw:.4f} nats per byte",
        style="bold",
    )
    return muon < adamw


def save_figure(demo: dict, path: Path) -> None:
    """Loss against steps and against seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"adamw": {"color": "#D55E00", "marker": "s"}, "muon": {"color": "#0072B2", "marker": "o"}}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, key, label in zip(axes, ("step", "seconds"), ("step", "seconds of training"), strict=True):
        for run, name in demo["names"].items():
            points = curve(demo, run)
            axis.plot([p[key] for p in points], [p["loss"] for p in points], label=name, ms=4, **styles[run])
            last = points[-1]
            above = 6 if run == "adamw" else -14
            axis.annotate(f"{last['loss']:.3f}", (last[key], last["loss"]), (0, above), textcoords="offset points",
                          ha="center", color=styles[run]["color"])  # fmt: skip
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("validation loss, nats per byte")
    axes[0].legend(frameon=False)
    figure.suptitle("The same small GPT, the same batches: FSDP2 + AdamW and FSDP2 + dmuon Muon", fontsize=11)
    text = conditions(demo).replace("; ", "\n", 1)
    figure.supxlabel(text, fontsize=7, color="0.35")
    figure.savefig(path, dpi=150)
    plt.close(figure)
