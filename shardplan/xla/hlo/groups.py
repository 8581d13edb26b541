"""Which devices a collective joins, and which mesh axes these are.

Spellings:
    {{0,1},{2,3}}                        listed
    [2,4]<=[4,2]T(1,0)                   iota: 0..7 as a 4x2 array, transposed, in 2 groups of 4
    mesh['data'=4,'model'=2] {'data'}    named: devices that differ in 'data' only; 'data':(2)2 is part of an axis
    {}                                   everybody

>>> groups("[2,4]<=[4,2]T(1,0)", 8)
((0, 2, 4, 6), (1, 3, 5, 7))
>>> axes_of(groups("[2,4]<=[4,2]T(1,0)", 8), MeshShape(("data", "model"), (4, 2)))
('data',)
"""

from __future__ import annotations

import itertools
import re

import numpy as np

from shardplan.ir.graph import components
from shardplan.mesh.layout import MeshShape

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_IDS = re.compile(r"(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_NAMED = re.compile(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?)\))?\s*\{(.*?)\}$")
_AXIS = re.compile(r"'?([^',=:]+?)'?:\((\d+)\)(\d+)|'?([^',=:]+)'?")


def groups(text: str | None, n_devices: int) -> Groups:
    """Device numbers of every group, in any spelling XLA prints.

    Raises:
        ValueError: an unknown spelling.
    """
    text = (text or "{}").strip()
    if text in ("{}", "{{}}"):
        return (tuple(range(n_devices)),)
    if found := _IOTA.match(text):
        return _tuples(_iota(*found.groups()))
    if found := _NAMED.match(text):
        return _named(*found.groups())
    if re.fullmatch(r"\{\s*(\{[\d,\s]*\}[,\s]*)+\}", text):
        return tuple(tuple(map(int, re.findall(r"\d+", g))) for g in re.findall(r"\{([\d,\s]*)\}", text))
    raise ValueError(f"replica groups {text!r} are in no known form; known are lists, iota and mesh-named groups")


def pairs(text: str | None) -> tuple[tuple[int, int], ...]:
    """`source_target_pairs={{0,1},{1,0}}` as ((0, 1), (1, 0))."""
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text or ""))


def linked_groups(links: tuple[tuple[int, int], ...]) -> Groups:
    """Devices that are connected by `links`, as groups, smallest member first."""
    devices = sorted({device for link in links for device in link})
    component = components(max(devices, default=-1) + 1, links)
    members: dict[int, list[int]] = {}
    for device in devices:
        members.setdefault(component[device], []).append(device)
    return tuple(map(tuple, members.values()))


def axes_of(members: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes, in mesh order, along which members of one group differ; devices are numbered row-major.

    Groups that use only part of an axis name that axis too.
    """
    sizes = np.array(mesh.sizes)
    differ = np.zeros(len(sizes), bool)
    for group in members:
        if len(group) > 1:
            where = np.array(np.unravel_index(np.array(group), sizes))
            differ |= (where != where[:, :1]).any(axis=1)
    return tuple(a for a, d in zip(mesh.axes, differ, strict=True) if d)


def axes_of_pairs(links: tuple[tuple[int, int], ...], mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes along which some source differs from its target."""
    return axes_of(tuple(link for link in links if link[0] != link[1]), mesh)


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(shape: str | None, dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
    return (ids.transpose(_ints(order)) if order else ids).reshape(_ints(shape) if shape else -1)


def _named(mesh: str, device_ids: str | None, axes: str) -> Groups:
    sizes = {name.strip(" '\""): int(size) for name, size in (entry.rsplit("=", 1) for entry in mesh.split(",") if entry)}
    iota = _IDS.search(device_ids or "")
    if iota:
        ids = _iota(None, iota[1], iota[2])
    else:
        ids = np.array(_ints(device_ids)) if device_ids else np.arange(np.prod(list(sizes.values())))
    parts = {name: [(1, size)] for name, size in sizes.items()}
    wanted: list[tuple[str, int]] = []
    for name, before, size, full in _AXIS.findall(axes.replace('"', "'")):
        wanted.append((name.strip(), int(before)) if name else (full.strip(), 1))
        if name:
            parts[name.strip()] = _divide(parts[name.strip()], int(before), int(size))
    dims = [(name, before, size) for name in sizes for before, size in parts[name]]
    together = [next(i for i, (n, b, _) in enumerate(dims) if (n, b) == w) for w in wanted]
    others = [i for i in range(len(dims)) if i not in together]
    shape = [size for _, _, size in dims]
    per_group = int(np.prod([shape[i] for i in together]))
    return _tuples(ids.reshape(shape).transpose(others + together).reshape(-1, per_group))


def _divide(parts: list[tuple[int, int]], before: int, size: int) -> list[tuple[int, int]]:
    """An axis, given as (elements before, size) pieces, divided so that (before, size) is a piece of its own."""
    out = []
    for start, length in parts:
        stops = sorted({start, start * length} | {s for s in (before, before * size) if start < s < start * length})
        out += [(a, b // a) for a, b in itertools.pairwise(stops)] or [(start, length)]
    return out


def _tuples(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in ids)
