"""A hardware profile as a TOML file: every value with its unit behind it, and nothing guessed when read back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomlkit
from tomlkit.items import Item, Table

from lohan_fx.hardware import HardwareProfile, NvmeProfile, Prices, RequestRate

FORMAT = 1

T = TypeVar("T")


def write(profile: HardwareProfile, path: Path) -> None:
    """Write `profile` to `path`."""
    document = tomlkit.document()
    document.add(tomlkit.comment("A hardware profile of lohan_fx. Seconds, bytes and their quotients; numbers may be"))
    document.add(tomlkit.comment("edited, keys may not. HardwareProfile.measure() makes one, load() reads it."))
    document.add(tomlkit.nl())
    document.add("format", tomlkit.item(FORMAT))
    for key, item in _table(profile).value.body:
        if key is not None:
            document.add(key, item)
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


def read(path: Path) -> HardwareProfile:
    """Read the profile in `path`.

    Raises FileNotFoundError, and ValueError or TypeError that name the file: for text that is no TOML, a newer
    format, keys that are unknown or missing, and values that a profile refuses.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no hardware profile at {path}: HardwareProfile.measure(...).save({str(path)!r}) writes one"
        ) from error
    try:
        table = tomllib.loads(content.decode())
        _check_format(table.pop("format", None))
        return _build(HardwareProfile, table, "the profile")
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    except ValueError as error:  # also what decoding and tomllib raise
        raise ValueError(f"{path}: {error}") from error


def _check_format(found: object) -> None:
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"format is {found!r}: expected {FORMAT}; is this a hardware profile of lohan_fx?")
    if found > FORMAT:
        raise ValueError(f"format is {found}, newer than the {FORMAT} this lohan_fx reads: update lohan_fx or measure")


def _table(item: object) -> Table:
    """The fields of a dataclass instance, plain values first as TOML wants them; None is left out."""
    table = tomlkit.table()
    hints = get_type_hints(type(item), include_extras=True)
    values = [(field.name, getattr(item, field.name)) for field in fields(item)]  # type: ignore[arg-type]
    for nested in (False, True):
        for name, value in values:
            if value is None or _is_nested(value) is not nested:
                continue
            entry = _entry(value)
            if notes := getattr(hints[name], "__metadata__", ()):
                entry.comment(notes[0])
            table.add(name, entry)
    return table


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping | Prices) or (isinstance(value, tuple) and bool(value))


def _entry(value: Any) -> Item:
    if isinstance(value, Mapping):
        mapping = tomlkit.table()
        for key in value:
            mapping.add(key, _entry(value[key]))
        return mapping
    if isinstance(value, tuple) and value:
        tables = tomlkit.aot()
        for element in value:
            tables.append(_table(element))
        return tables
    if isinstance(value, Prices):
        return _table(value)
    if isinstance(value, int | float):
        # Grouped digits: 21_200_000_000.0 can be read, 21200000000.0 cannot.
        number: Item = tomlkit.value(f"{value:_}")
        return number
    return tomlkit.array() if isinstance(value, tuple) else tomlkit.string(value)


def _build(kind: type[T], table: object, where: str) -> T:
    """A `kind` from the keys of `table`, which must be exactly its fields; one with a default may be missing."""
    if not isinstance(table, dict):
        raise TypeError(f"{where} is {table!r}: expected a table")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [key for key in table if key not in known]
    missing = [name for name, field in known.items() if name not in table and field.default is MISSING]
    if unknown or missing:
        found = [f"unknown {', '.join(map(repr, unknown))}"] if unknown else []
        found += [f"missing {', '.join(map(repr, missing))}"] if missing else []
        raise ValueError(f"keys of {where}: {'; '.join(found)}; expected {', '.join(known)}")
    values = dict(table)
    for key, element in (("nvme", NvmeProfile), ("by_request", RequestRate)):
        if key in values:
            if not isinstance(values[key], list):
                raise TypeError(f"{key} of {where} is {values[key]!r}: expected [[{key}]] tables")
            tables = enumerate(values[key], start=1)
            values[key] = tuple(_build(element, entry, f"{key} {number} of {where}") for number, entry in tables)
    if "prices" in values:
        values["prices"] = _build(Prices, values["prices"], f"prices of {where}")
    return kind(**values)
