"""Plans made by hand for tests of what reads and shows them."""

from collections.abc import Sequence

from msgspec.structs import replace

from shardplan.mesh.layout import Layout, MeshShape
from shardplan.plan import Plan
from shardplan.plan.data import Leaf, MemoryReport, PlanDecision, PlannedCollective, PlannedReshard, SourceLine

MESH = MeshShape(("data", "model"), (2, 4))

SOURCE = """\
import jax, jax.numpy as jnp


def block(x, w):
    h = jax.nn.gelu(x @ w["up"])
    return x + h @ w["down"]


def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]]
    for w in params["blocks"]:
        x = block(x, w)
    return jnp.mean(x**2)
"""


def layout(*dims: str, partial: tuple[tuple[str, str], ...] = ()) -> Layout:
    """layout("data", "", "x y") splits dim 0 over data and dim 2 over x and y."""
    return Layout(tuple(tuple(d.split()) for d in dims), partial)


def leaf(path: str, shape: tuple[int, ...], *dims: str, kind: str = "parameters", dtype: str = "float32") -> Leaf:
    return Leaf(path, shape, dtype, layout(*dims), kind)


def decision(file: str, line: int, function: str, primitive: str, occurrence: int = 0, **more) -> PlanDecision:
    rest = dict(op=0, phase="forward", strategy={}, operand_layouts=(), copy_numbers=(), result_layouts=(), result_type="")
    rest |= dict(reshards=(), seconds=0.0, runs=1.0)
    return PlanDecision(file=file, line=line, function=function, primitive=primitive, occurrence=occurrence, **(rest | more))


def numbered(decisions: Sequence[PlanDecision]) -> tuple[PlanDecision, ...]:
    """Decisions as about one op after the other."""
    return tuple(replace(d, op=n) for n, d in enumerate(decisions))


def source_lines(decisions: Sequence[PlanDecision], text: str = SOURCE) -> tuple[SourceLine, ...]:
    """The lines of a program on which the decisions stand."""
    seconds: dict[tuple[str, int], float] = {}
    for d in decisions:
        seconds[d.file, d.line] = seconds.get((d.file, d.line), 0.0) + d.runs * d.seconds
    code = ["", *text.splitlines()]
    return tuple(SourceLine(file, n, code[n] if n < len(code) else "", s) for (file, n), s in seconds.items())


def transformer(layers: int = 3, file: str = "train.py") -> Plan:
    """Column-then-row split blocks on a 2 x 4 mesh: one all-reduce each way per layer, gradients summed over data."""
    states, moved = [], []
    for n in range(layers):
        for role in ("params", "opt/mu", "opt/nu"):
            kind = "parameters" if role == "params" else "optimizer"
            states += [
                leaf(f"state/{role}/blocks/{n}/down", (3072, 768), "model", "", kind=kind),
                leaf(f"state/{role}/blocks/{n}/up", (768, 3072), "", "model", kind=kind),
            ]
    states.append(leaf("state/params/embed", (50304, 768), "", ""))
    batch = leaf("batch/tokens", (16, 512), "data", "", kind="batch", dtype="int32")

    over_model = layout("data", "", "", partial=(("model", "sum"),))
    over_data = layout("", "model", partial=(("data", "sum"),))
    row = PlannedCollective("all-reduce", ("model",), 12_582_912.0, 41e-6)
    whole = PlannedCollective("all-reduce", ("data",), 2_359_296.0, 18e-6)
    moved.append(
        decision(
            file, 10, "loss_fn", "gather", strategy={"data": "a"}, seconds=11e-6, result_type="float32[16,512,768]",
            result_layouts=(layout("data", "", ""),),
        )
    )  # fmt: skip
    for n in range(layers):
        moved += [
            decision(
                file, 5, "block", "dot_general", n, strategy={"data": "a", "model": "c"}, seconds=110e-6,
                result_type="float32[16,512,3072]", result_layouts=(layout("data", "", "model"),),
            ),
            decision(
                file, 6, "block", "add", n, seconds=5e-6, result_type="float32[16,512,768]", result_layouts=(layout("data", "", ""),),
                operand_layouts=((), (layout("data", "", ""),)),
                reshards=(PlannedReshard(1, "float32[16,512,768]", over_model, layout("data", "", ""), (row,)),),
            ),
        ]  # fmt: skip
    for n in range(layers):
        moved.append(
            decision(
                file, 5, "block", "transpose", n, phase="backward", seconds=3e-6, result_type="float32[768,3072]",
                result_layouts=(layout("", "model"),),
                reshards=(PlannedReshard(0, "float32[768,3072]", over_data, layout("", "model"), (whole,)),),
            )
        )  # fmt: skip
    profile = tuple({"activations": 1e8 * min(n, 40 - n), "optimizer": 6e8, "parameters": 3.1e8} for n in range(41))
    compute, communication = 4.2e-3, layers * 59e-6
    total = compute + communication
    return Plan(
        mesh=MESH,
        cluster="h100",
        inputs=(*states, batch),
        outputs=tuple(replace(x, path=x.path.removeprefix("state/"), kind="output") for x in states),
        decisions=numbered(moved),
        lines=source_lines(moved),
        seconds=dict(compute=compute, communication=communication, hidden=0.0, total=total, bound=total * 0.996),
        status="feasible",
        gap=0.004,
        symmetric_layers=True,
        memory_report=MemoryReport(
            2.91e9, 80e9, "train.py:6 in block", {"activations": 2e9, "optimizer": 6e8, "parameters": 3.1e8}, profile
        ),
        search="ilp",
        fingerprint="0123456789abcdef" * 4,
        donated=(),
        unknown=(("my_kernel", "train.py:13"),),
    )
