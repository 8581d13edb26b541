"""How XLA spells groups of devices and shardings, read as device numbers, mesh axes and layouts.

Groups, of a collective:
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
import math
import re
from collections import defaultdict

import numpy as np

from shardplan.ir.graph import components
from shardplan.mesh.layout import Layout, MeshShape

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_IDS = re.compile(r"(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_NAMED = re.compile(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?)\))?\s*\{(.*?)\}$")
_AXIS = re.compile(r"'?([^',=:]+?)'?:\((\d+)\)(\d+)|'?([^',=:]+)'?")


def groups(text: str | None, n_devices: int) -> Groups:
    """Device numbers of every group, in any spelling XLA prints; ValueError for an unknown one."""
    text = (text or "{}").strip()
    if text in ("{}", "{{}}"):
        return (tuple(range(n_devices)),)
    if found := _IOTA.match(text):
        return tuple(map(tuple, _iota(*found.groups()).tolist()))
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
    members = defaultdict(list)
    for device in devices:
        members[component[device]].append(device)
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


def layout_of(sharding: str, mesh: MeshShape, rank: int) -> Layout | None:
    """XLA's sharding as a layout on `mesh`; None where it divides a mesh axis.

    >>> mesh = MeshShape(("data", "model"), (4, 2))
    >>> str(layout_of("{devices=[1,8]<=[4,2]T(1,0)}", mesh, 2)), str(layout_of("{replicated}", mesh, 2))
    ("P(None, ('model', 'data'))", 'P(None, None)')
    """
    if "replicated" in sharding and "devices" not in sharding:
        return Layout.replicated(rank)
    if "mesh[" in sharding:
        return _named_layout(sharding, mesh, rank)
    tiles = re.search(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))", sharding)
    if not tiles:
        return None
    ids = _iota(*tiles.group(1, 2, 3)) if tiles[2] else np.array(_ints(tiles[4])).reshape(_ints(tiles[1]))
    if ids.size != mesh.n_devices or ids.ndim < rank:
        return None
    split = []
    for dim in range(rank):
        line = np.moveaxis(ids, dim, -1).reshape(-1, ids.shape[dim])[0]
        where = zip(mesh.axes, np.unravel_index(line, mesh.sizes), strict=True)
        first_change = {axis: int(np.argmax(at != at[0])) for axis, at in where if (at != at[0]).any()}
        if mesh.size(*first_change) != len(line):
            return None
        split.append(tuple(sorted(first_change, key=first_change.__getitem__, reverse=True)))
    return Layout(tuple(split))


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(shape: str | None, dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_ints(dims))).reshape(_ints(dims))
    return (ids.transpose(_ints(order)) if order else ids).reshape(_ints(shape) if shape else -1)


def _named(mesh: str, device_ids: str | None, axes: str) -> Groups:
    sizes = {name.strip(" '\""): int(size) for name, size in (entry.rsplit("=", 1) for entry in mesh.split(",") if entry)}
    if iota := _IDS.search(device_ids or ""):
        ids = _iota(None, *iota.groups())
    else:
        ids = np.array(_ints(device_ids)) if device_ids else np.arange(math.prod(sizes.values()))
    wanted, cuts = [], {name: {1, size} for name, size in sizes.items()}
    for name, before, size, full in _AXIS.findall(axes.replace('"', "'")):
        wanted.append(((name or full).strip(), int(before or 1)))
        cuts[wanted[-1][0]] |= {int(before), int(before) * int(size)} if name else set()
    pieces = [(name, start, stop // start) for name in sizes for start, stop in itertools.pairwise(sorted(cuts[name]))]
    together = [i for one in wanted for i, (*piece, _) in enumerate(pieces) if tuple(piece) == one]
    others = [i for i in range(len(pieces)) if i not in together]
    shape = [size for *_, size in pieces]
    ids = ids.reshape(shape).transpose(others + together).reshape(-1, math.prod(shape[i] for i in together))
    return tuple(map(tuple, ids.tolist()))


def _named_layout(sharding: str, mesh: MeshShape, rank: int) -> Layout | None:
    """`{mesh['data'=4,'model'=2], [{'model'}, {}]}`, when that mesh is ours."""
    found = re.search(r"mesh\[(.*?)\](,\s*device_ids=.*?\))?,\s*\[(.*?)\]", sharding)
    if not found or found[2]:
        return None
    sizes = re.findall(r"'?([^',=]+)'?=(\d+)", found[1])
    if tuple((a, int(n)) for a, n in sizes) != tuple(mesh) or ":(" in found[3]:
        return None
    dims = [tuple(re.findall(r"'([^']+)'", dim)) for dim in re.findall(r"\{(.*?)\}", found[3])]
    return Layout(tuple(dims)) if len(dims) == rank else None
