"""dmuon's Muon against FSDP2 + AdamW on meshes: measured here, predicted for ranks that are not here, and checked.

    torchrun --standalone --nproc-per-node 2 bench/scaling.py --preset 1b --out results/1b_2
    torchrun --standalone --nproc-per-node 8 bench/scaling.py --meshes 8 2x4 4x2 --contenders adamw_z3 muon_z3_root
    python bench/scaling.py --predict 1 2 4 8 64 1024 --measured results/1b_*/scaling.json --out results/1b_predicted
    python bench/scaling.py --plot results/1b_*/scaling.json --out docs/assets
    torchrun --standalone --nproc-per-node 8 bench/scaling.py --check --device cpu

A mesh is written RANKS (shard only) or REPLICATExSHARD, as 2x4 for two replicas of four ranks; without --meshes, shard
only and every number of replicas that divides the ranks.  Contenders, presets and tokens are those of step_time.py, and
so is how steps are timed: AdamW runs on the same mesh, in turn with dmuon; z2 and z3 one after the other, so that both
need not fit.  Beside the step: every owner's part of the optimizer against the plan, bytes on the wire against the
formulas of docs/hsdp.md, and dmuon's memory against the plan.

--predict needs no GPU.  Its step time is the model of scaling_model.py, with constants from --measured files; without
them it is left out.  --check trains the tiny preset a few steps on each mesh and compares with plain torch.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plots
import scaling_check
import scaling_report
import torch.distributed as dist
from scaling_measure import measure_mesh
from scaling_model import GATHERS, Shape, all_shapes, model_sizes, parse_shape, predict, predicted_shapes
from step_time import PRESETS, describe, describe_setup, make_parser, read_arguments, start
from torch.nn.attention import SDPBackend, sdpa_kernel

CONTENDERS = ["adamw_z3", "muon_z3_root", "adamw_z2", "muon_z2_root"]
NODE_GB = 50.0
"""What a 400 Gb/s network adapter a GPU gives at most."""


def shape(text: str) -> Shape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, CONTENDERS)
    parser.add_argument("--meshes", nargs="+", type=shape, metavar="MESH", help="RANKS or REPLICATExSHARD")
    parser.add_argument("--check", action="store_true", help="correctness instead of time")
    parser.add_argument("--predict", nargs="+", type=int, metavar="RANKS", help="no torchrun, no GPU")
    parser.add_argument("--measured", nargs="+", type=Path, default=[], metavar="JSON", help="constants for --predict")
    parser.add_argument("--node", type=int, default=8, help="ranks of a node, for --predict")
    parser.add_argument("--link-bandwidth", type=float, metavar="GB/S", help="inside a node, instead of the measured")
    parser.add_argument("--node-bandwidth", type=float, default=NODE_GB, metavar="GB/S", help="a rank, between nodes")
    parser.add_argument("--plot", nargs="+", type=Path, metavar="JSON", help="scaling.png from these, into --out")
    args = read_arguments(parser)
    if args.plot and args.out is None:
        parser.error("--plot needs --out")
    if not args.rounds:
        parser.error("--rounds has to be 1 or more")
    if args.check and not muon_of(args):
        parser.error("--check needs a contender of dmuon")
    return args


def muon_of(args: argparse.Namespace) -> list[str]:
    return [name for name in args.contenders if name.startswith("muon")]


def load(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in paths]


def save(result: dict[str, Any], out: Path | None) -> None:
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "scaling.json").write_text(json.dumps(result, indent=1))


def parameters_of(preset: str) -> int:
    sizes = model_sizes(PRESETS[preset])
    return sizes.elements + sizes.rest


def shapes_to_predict(measured: list[dict[str, Any]], args: argparse.Namespace) -> list[Shape]:
    """Those of --predict, of --meshes, and those that were measured."""
    shapes = [s for ranks in args.predict for s in predicted_shapes(ranks, args.node)]
    shapes += [*(args.meshes or []), *(parse_shape(row["mesh"]) for row in measured)]
    return sorted(set(shapes), key=lambda s: (s.ranks, s.replicate is not None, s.replicas))


def predict_mode(mode: str, measured: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a mesh, printed.  For the first of --tokens, like the constants."""
    tokens, bandwidths = args.tokens[0], (args.link_bandwidth, args.node_bandwidth)
    constants = scaling_report.find_constants(measured, tokens, mode, bandwidths, args.node)
    rows = [predict(s, PRESETS[args.preset], mode, constants) for s in shapes_to_predict(measured, args)]
    rows = [scaling_report.attach_measured(row, measured, tokens) for row in rows]
    scaling_report.print_predicted(rows, f"{args.preset}, {mode}, {tokens} tokens a rank: predicted")
    if constants is None:
        print("no step times: --measured gave no bandwidth, or no adamw and muon of this mode with these tokens")
    else:
        print(json.dumps(asdict(constants), indent=1))
    return [row | {"constants": constants and asdict(constants)} for row in rows]


def predict_all(args: argparse.Namespace) -> None:
    tokens = args.tokens[0]
    measured = list(scaling_report.measured_rows(load(args.measured), args.preset, tokens))
    predicted = [row for mode in GATHERS for row in predict_mode(mode, measured, args)]
    print(
        "MiB: of the rank that holds most (state: masters and momentum); on the wire in a step: the mean of the ranks"
    )
    setup = {"preset": args.preset, "parameters": parameters_of(args.preset)}
    save({"setup": setup, "tokens": tokens, "predicted": predicted}, args.out)


def measure_all(shapes: list[Shape], args: argparse.Namespace) -> None:
    config, rank = PRESETS[args.preset], dist.get_rank()
    result = {"setup": describe_setup(config, parameters_of(args.preset), args), "measured": []}
    if rank == 0:
        print(json.dumps(result["setup"]))
    for mesh in shapes:
        row = measure_mesh(mesh, config, args)
        result["measured"].append(row)
        if rank == 0:
            print(f"\nmesh {mesh}")
            for tokens, figures in row["tokens"].items():
                print(describe(tokens, figures), flush=True)
            scaling_report.print_measured(row)
            save(result, args.out)


def check_all(shapes: list[Shape], args: argparse.Namespace) -> bool:
    """Prints and, on rank 0, saves; whether all is right."""
    with sdpa_kernel(SDPBackend.MATH):  # other backwards do not repeat their bits on GPUs
        rows = scaling_check.check(shapes, PRESETS["tiny"], args.device, muon_of(args))
    if dist.get_rank() == 0:
        scaling_report.print_checks(rows)
        save({"checked": rows}, args.out)
    return all(map(scaling_check.passed, rows))


def main() -> int:
    args = parse()
    if args.plot:
        args.out.mkdir(parents=True, exist_ok=True)
        plots.draw_scaling(load(args.plot), args.tokens[0], args.out / "scaling.png")
        return 0
    if args.predict:
        predict_all(args)
        return 0
    start(args.device)
    shapes = args.meshes or all_shapes(dist.get_world_size())
    if wrong := [str(mesh) for mesh in shapes if mesh.ranks != dist.get_world_size()]:
        raise SystemExit(f"--meshes {' '.join(wrong)}: expected meshes of {dist.get_world_size()} ranks")
    right = True
    if args.check:
        right = check_all(shapes, args)
    else:
        measure_all(shapes, args)
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
