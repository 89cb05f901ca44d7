"""Tables of scaling.py, and which measurement stands next to which prediction."""

from collections.abc import Iterable, Iterator
from typing import Any

from scaling_model import Constants

MIB, GIB = 2**20, 2**30
Row = dict[str, Any]


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """With rich, or in plain columns on a machine without it."""
    columns, rows = list(columns), [list(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        lines = [[cell.replace("\n", " ") for cell in line] for line in (columns, *rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{title}")
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def against(predicted: float, measured: float, digits: int = 2) -> str:
    return f"{number(predicted, digits)} / {number(measured, digits)}"


def print_measured(row: Row) -> None:
    """Owners, bytes and memory of one mesh."""
    cells = []
    for name, of in row["dmuon"].items():
        owners, wire, memory = of["owners"], of["wire"], of["memory"]
        formula, counted = (sum(wire[kind].values()) for kind in ("formula", "counted"))
        cells.append(
            [
                name,
                against(owners["predicted"]["largest_ms"], owners["measured"]["largest_ms"], 3),
                against(owners["predicted"]["max_over_mean"], owners["measured"]["max_over_mean"], 3),
                f"{counted / MIB:.3f}",
                "yes" if wire["formula"] == wire["counted"] else f"no, formula {formula / MIB:.3f}",
                against(max(memory["predicted_peak"]) / MIB, max(memory["peak"]) / MIB, 1),
            ]
        )
    gb = ", ".join(f"{axis} {number(value, 1)}" for axis, value in row["gb_per_second"].items())
    columns = ["", "largest owner ms", "max / mean", "MiB on the wire", "as the formulas say", "dmuon's peak MiB"]
    print_table(f"mesh {row['mesh']}: predicted / measured; all-gather GB/s a rank: {gb}", columns, cells)


def measured_rows(files: Iterable[Row], preset: str, tokens: str) -> Iterator[Row]:
    """Of all files, where these tokens were measured."""
    for file in files:
        if file["setup"]["preset"] == preset:
            yield from (row for row in file.get("measured", []) if tokens in row["tokens"])


def muon_names(row: Row, tokens: str, mode: str) -> list[str]:
    return [name for name in row["tokens"][tokens]["contenders"] if name.startswith(f"muon_{mode}")]


def find_constants(
    rows: Iterable[Row], tokens: str, mode: str, bandwidths: tuple[float | None, float], node: int
) -> Constants | None:
    """From the shard-only measurement of the fewest ranks, of AdamW and of the first contender of dmuon, and the
    fastest axis of all.  bandwidths: inside a node, if it is not to be the measured one, and between nodes.
    """
    rows = list(rows)
    found = [r for r in rows if f"adamw_{mode}" in r["tokens"][tokens]["contenders"] and muon_names(r, tokens, mode)]
    measured = [gb for row in rows for gb in row["gb_per_second"].values() if gb is not None]
    link = bandwidths[0] or max(measured, default=None)
    if not found or link is None:
        return None
    row = min(found, key=lambda row: (row["ranks"], "x" in row["mesh"]))
    name, shard = muon_names(row, tokens, mode)[0], int(row["mesh"].split("x")[-1])
    muon, adamw = (row["tokens"][tokens]["contenders"][key] for key in (name, f"adamw_{mode}"))
    owner = row["dmuon"][name]["owners"]["measured"]["owner_ms"][0]
    here = f"measured on mesh {row['mesh']}, {tokens} tokens a rank"
    return Constants(
        forward_ms=muon["forward_ms"],
        backward_ms=muon["backward_ms"],
        adamw_compute_ms=adamw["forward_ms"] + adamw["backward_ms"],
        rest_ms=shard * max(0.0, muon["optimizer_ms"] - owner),
        adamw_ms=shard * adamw["optimizer_ms"],
        link_gb=link,
        node_gb=bandwidths[1],
        node=node,
        sources={
            "forward_ms, backward_ms": f"{name}, {here}",
            "adamw_compute_ms": f"adamw_{mode}, {here}",
            "rest_ms": f"{name}, {here}: optimizer less the owner's part, times {shard}",
            "adamw_ms": f"adamw_{mode}, {here}: optimizer, times {shard}",
            "link_gb": "--link-bandwidth" if bandwidths[0] else "the fastest all-gather that was measured",
            "node_gb": "--node-bandwidth: not measured",
        },
    )


def attach_measured(prediction: Row, rows: Iterable[Row], tokens: str) -> Row:
    """The prediction with what was measured on the same mesh: {contender: step and largest owner's ms}."""
    measured = {}
    for row in rows:
        if row["mesh"] != prediction["mesh"]:
            continue
        for name, figures in row["tokens"][tokens]["contenders"].items():
            if name.split("_")[1] == prediction["mode"]:
                owners = row["dmuon"].get(name, {}).get("owners", {}).get("measured", {})
                measured[name] = {"step_ms": figures["step_ms"], "largest_ms": owners.get("largest_ms")}
    return prediction | {"measured": measured}


def print_predicted(rows: list[Row], title: str) -> None:
    columns = [
        "mesh", "largest\nowner ms", "max /\nmean", "without\na matrix", "state\nMiB", "dmuon's\npeak MiB",
        "MiB on\nthe wire", "of\nAdamW", "exposed\nms", "step\nms", "AdamW's\nstep ms",
        "measured step (largest owner) ms",
    ]  # fmt: skip
    cells = []
    for row in rows:
        measured = [f"{n} {of['step_ms']:.2f} ({number(of['largest_ms'])})" for n, of in row["measured"].items()]
        wire = sum(row["wire_bytes"].values()) + row["fsdp2_wire_bytes"]
        cells.append(
            [
                row["mesh"], number(row["largest_ms"]), number(row["max_over_mean"], 3), str(row["without_matrix"]),
                number(row["state_bytes"] / MIB, 0), number(row["peak_bytes"] / MIB, 0), number(wire / MIB, 0),
                number(row["adamw_wire_bytes"] / MIB, 0), number(row.get("exposed_ms")),
                number(row.get("step_ms")), number(row.get("adamw_step_ms")), "\n".join(measured) or "-",
            ]
        )  # fmt: skip
    print_table(title, columns, cells)


def print_checks(rows: list[Row]) -> None:
    columns = [
        "mesh",
        "contender",
        "loss",
        "in plain torch",
        "largest relative difference",
        "async = sync, bit for bit",
    ]
    cells = [
        [
            row["mesh"], row["contender"], f"{row['loss']:.6f}", f"{row['plain_loss']:.6f}",
            f"{row['relative_error']:.1e}", "yes" if row["async_is_sync"] else "NO",
        ]
        for row in rows
    ]  # fmt: skip
    print_table("Losses on each mesh and of one process with the batches of all ranks", columns, cells)
