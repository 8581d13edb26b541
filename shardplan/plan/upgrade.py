"""Plan files of earlier versions as files of this one: JSON values in, JSON values out."""

from __future__ import annotations

from typing import Any

from shardplan.errors import PlanFileError

DECISION = {"reads": "operand_layouts", "copies": "copy_numbers", "results": "result_layouts", "result": "result_type"}
"""Fields of a decision in version 1 that have another name now; "moves" became "reshards", and their "value" "array"."""


def from_version_1(value: dict[str, Any]) -> dict[str, Any]:
    """A plan of version 1 in version 2: other names, leaves in a list, and every layout an object.

    Raises:
        PlanFileError: a field of version 1 is missing or is of another kind.
    """
    try:
        fields = {**value, "version": 2}
        fields["symmetric_layers"] = fields.pop("tied")
        for name in ("inputs", "outputs"):
            fields[name] = [{"path": path, **leaf, "layout": _layout(leaf["layout"])} for path, leaf in value[name].items()]
        fields["decisions"] = [_decision(d) for d in value["decisions"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanFileError(f"damaged: no plan of version 1 ({type(error).__name__}: {error}).\n  way out: plan anew") from None
    return fields


def _layout(x: Any) -> Any:
    """A layout that was a list of its dims as an object; a partial layout was one already."""
    return {"dims": x} if isinstance(x, list) else x


def _decision(d: dict[str, Any]) -> dict[str, Any]:
    fields = {DECISION.get(name, name): x for name, x in d.items()}
    fields["operand_layouts"] = [[_layout(x) for x in chain] for chain in d["reads"]]
    fields["result_layouts"] = [_layout(x) for x in d["results"]]
    fields["reshards"] = [_reshard(x) for x in fields.pop("moves")]
    return fields


def _reshard(x: dict[str, Any]) -> dict[str, Any]:
    fields = {**x, "before": _layout(x["before"]), "after": _layout(x["after"])}
    return fields | {"array": fields.pop("value")}
