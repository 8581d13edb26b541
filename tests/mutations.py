"""Files as nobody saved them: JSON with junk in any place, and bytes that are cut, turned, repeated, or of another format."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

EVIL = "</script><img src=x onerror=alert(1)>"
NAMES = ("", "x", "data", "model", "\x00", "\ud800", "../../etc/passwd", "/dev/zero", EVIL, "a" * 3_000, "nan", "\x1b[2J", "🙂")
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e308, 5e-324, float("inf"), float("nan"))
DEEP = "(deep)"  # stands for thousands of brackets, which no Python value can hold


def junk(random: Random, deep: int = 2) -> Any:
    """A value that may stand in JSON."""
    kind = random.randrange(6 if deep else 3)
    if kind < 2:
        return random.choice(NUMBERS if kind else NAMES)
    if kind == 2:
        return random.choice((None, True, False))
    if kind == 3:
        return [junk(random, deep - 1) for _ in range(random.choice((0, 1, 2, 3, 40)))]
    if kind == 4:
        return {random.choice(NAMES): junk(random, deep - 1) for _ in range(random.randrange(4))}
    return DEEP


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside."""
    for key, x in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(x, (*path, key))


def structural(raw: bytes, where: list[tuple], random: Random) -> bytes:
    """Up to three places replaced by junk or by what stands elsewhere, renamed, repeated, or taken out."""
    value = json.loads(raw)

    def at(path: tuple) -> Any:
        found = value
        for key in path:
            found = found[key]
        return found

    for _ in range(random.choice((1, 1, 1, 2, 3))):
        path, how = random.choice(where), random.randrange(6)
        try:
            inside, key = at(path[:-1]), path[-1]
            if how < 3:
                inside[key] = junk(random)
            elif how == 3:
                inside[key] = json.loads(json.dumps(at(random.choice(where))))
            elif how == 4:
                del inside[key]
            elif isinstance(inside, list):
                inside.insert(key, inside[key])
            elif isinstance(inside, dict):
                inside[random.choice(NAMES)] = inside.pop(key)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took that place away
    text = json.dumps(value)
    if (deep := json.dumps(DEEP)) in text:
        n = random.choice((50, 50, 50, 5_000, 5_000, 100_000))
        text = text.replace(deep, random.choice(("[" * n + "]" * n, '{"a":' * n + "1" + "}" * n)), 1).replace(deep, "[[[[]]]]")
    return text.encode("utf-8", "surrogatepass")


def bytewise(raw: bytes, random: Random) -> bytes:
    """The bytes cut, with some turned, repeated, inserted or taken out."""
    a, b = sorted(random.randrange(len(raw) + 1) for _ in range(2))
    kind = random.randrange(6)
    if kind == 0:
        return raw[:a]
    if kind == 1:
        return raw[a:b]
    if kind == 2:
        return raw[:a] + raw[b:]
    if kind == 3:
        return raw[:b] + raw[a:]
    found = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 8))):
        n = random.randrange(len(found))
        if kind == 4:
            found[n] ^= 1 << random.randrange(8)
        else:
            found[n:n] = random.choice((b"{", b"[", b"]", b'"', b",", b"9" * 5000, b"\xff", b"\x00", b"1e", b"-", b"null", b"\\u"))
    return bytes(found)


def mutations(raw: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """So many other files, drawn from a seed."""
    random, where = Random(seed), list(places(json.loads(raw)))
    for _ in range(count):
        yield bytewise(raw, random) if random.random() < 0.3 else structural(raw, where, random)
