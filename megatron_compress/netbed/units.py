"""Rates and delays as people and tc write them."""

from __future__ import annotations

import re

_RATE = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str) -> float:
    """Bits per second of "100mbit", say.

    Raises:
        ValueError: not a number above zero with one of the units.
    """
    return _parse(text, "rate", _RATE)


def delay(text: str) -> float:
    """Seconds of "10ms", say.

    Raises:
        ValueError: not a number above zero with one of the units.
    """
    return _parse(text, "delay", _DELAY)


def _parse(text: str, what: str, units: dict[str, float]) -> float:
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f"{what} {text!r}: write a number above zero and {', '.join(units)}, as in 10{list(units)[1]}")
    return float(found[1]) * units[found[2]]
