"""Steps with dims that no mesh axis divides: predicted seconds and peak memory, and the same compiled for absent GPUs.

    python benchmarks/uneven.py                    every case, planned
    python benchmarks/uneven.py --check 8b --slow  cases whose names have "8b", compiled, too, at two layers; `--slow`: at all layers

A line per case: seconds of a step, those of its communication, memory at the peak, of it parameters and optimizer state, tflop of
products on a device, and with `--check` planned over emitted bytes of collectives, peak memory and flops. Or why no plan fits.
"""

import argparse
import time

import jax
import zoo

import shardplan

PADDED = {"pad_state": True}
"""Options of cases whose state may be held padded between steps."""

STATE = "parameters", "optimizer"
"""Categories of memory that are held from step to step."""


def llama_7b(batch: int):
    return lambda layers: zoo.llama("7b", batch=batch, layers=layers)


def gpt2_xl(batch: int, seq: int):
    """25 heads of 64."""
    return lambda layers: zoo.gpt2(scan=True, layers=layers or 48, d=1600, heads=25, batch=batch, seq=seq, remat=True)


CASES = {
    "gpt2, 50304 words": (lambda layers: zoo.gpt2(scan=True, layers=layers or 12), (8,)),
    "gpt2, 50257 words": (lambda layers: zoo.gpt2(scan=True, layers=layers or 12, vocab=50257), (8,)),
    "gpt2, 50304 words, 2x4": (lambda layers: zoo.gpt2(scan=True, layers=layers or 12), (2, 4)),
    "gpt2, 50257 words, 2x4": (lambda layers: zoo.gpt2(scan=True, layers=layers or 12, vocab=50257), (2, 4)),
    "gpt2, 50257 words, padded rows": (
        lambda layers: zoo.gpt2(scan=True, layers=layers or 12, vocab=50257),
        (8,),
        PADDED | {"pins": {"**/tokens": jax.P("data")}},
    ),
    "gpt2, 50257 words, 3x2": (lambda layers: zoo.gpt2(scan=True, layers=layers or 12, vocab=50257, batch=64), (3, 2)),
    "gpt2-xl, 8 sequences, 2x4": (gpt2_xl(8, 1024), (2, 4)),
    "gpt2-xl, 2 sequences": (gpt2_xl(2, 1024), (8,)),
    "gpt2-xl, 2 sequences, 2x4": (gpt2_xl(2, 1024), (2, 4)),
    "gpt2-xl, a sequence of 8192": (gpt2_xl(1, 8192), (8,)),
    "a million classes and three": (lambda layers: zoo.classifier(1_000_003), (8,)),
    "llama-8b, 64 sequences": (lambda layers: zoo.llama("8b", batch=64, layers=layers), (12, 8)),
    "llama-8b, 64 sequences, 3x32": (lambda layers: zoo.llama("8b", batch=64, layers=layers), (3, 32)),
    "llama-8b, 96 sequences": (lambda layers: zoo.llama("8b", batch=96, layers=layers), (12, 8)),
    "llama-8b, 96 sequences, 3x32": (lambda layers: zoo.llama("8b", batch=96, layers=layers), (3, 32)),
    "llama-7b, 8x8 in 16 GB": (llama_7b(64), (8, 8), {"memory": "16GB"}),
    "llama-7b, 12x8 in 16 GB": (llama_7b(96), (12, 8), {"memory": "16GB"}),
    "llama-7b, 12x8 in 16 GB, padded": (llama_7b(96), (12, 8), PADDED | {"memory": "16GB"}),
    "llama-7b, 8x8 in 11 GB": (llama_7b(64), (8, 8), {"memory": "11GB"}),
    "llama-7b, 12x8 in 11 GB": (llama_7b(96), (12, 8), {"memory": "11GB"}),
    "llama-7b, 12x8 in 11 GB, padded": (llama_7b(96), (12, 8), PADDED | {"memory": "11GB"}),
    "llama-7b, 96": (llama_7b(96), (96,)),
    "llama-7b, 96, padded": (llama_7b(96), (96,), PADDED),
    "llama-70b, 96 sequences, 3x32": (lambda layers: zoo.llama("70b", batch=96, layers=layers), (3, 32)),
}


def target(devices: int) -> str:
    return f"h100:{devices // 8}x8" if devices > 8 else f"h100:{devices}"


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names of cases")
    parser.add_argument("--check", action="store_true", help="compile the steps, at two layers")
    parser.add_argument("--slow", action="store_true", help="compile them at all layers")
    options = parser.parse_args(argv)
    for name, (build, sizes, *more) in CASES.items():
        if options.names and not any(part in name for part in options.names):
            continue
        mesh = jax.sharding.AbstractMesh(sizes, ("data", "model")[: len(sizes)], axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
        step, *arguments = build(2 if options.check and not options.slow else None)
        start = time.process_time()
        try:
            plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0, **(more[0] if more else {}))(step).plan(*arguments)
        except shardplan.ShardingError as error:
            why = " ".join(line.strip() for line in str(error).splitlines()[:2])
            print(f"{name:<32}{why}", flush=True)
            continue
        tflop, memory = plan.context.planned.product_flops / 1e12, plan.memory()
        state = sum(n for category, n in memory.at_peak.items() if category in STATE)
        total_ms, sent_ms = (plan.seconds[part] * 1e3 for part in ("total", "communication"))
        text = f"{name:<32}{total_ms:9.1f} ms {sent_ms:8.1f} ms sent"
        text += f" {memory.peak / 2**30:7.2f} GiB, state {state / 2**30:6.2f} {tflop:8.1f} tflop"
        text += f"  planned in {time.process_time() - start:.0f} s"
        if options.check:
            report = plan.check(target(mesh.size))
            text += f"  collectives {report.collectives_ratio:.2f} memory {report.memory_ratio:.2f} flops {report.flops_ratio:.2f}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
