"""Regular expressions of the decimal numbers between two others.

llguidance's own are narrower: of the numbers up to 0.95 it has 0.90, but no 0.9.
"""

from __future__ import annotations


def decimals(low: int, high: int, places: int) -> str:
    """Return the pattern of numbers with at most so many digits after the point.

    `low` and `high`, which belong to it, are counted in units of the last of those digits and are
    not negative. A number begins with no zero but that before its point, and may end with zeros.
    """
    scale = 10**places
    first, last = low // scale, high // scale
    if first == last:
        return f"{first}{_point(low % scale, high % scale, places)}"
    parts = [f"{first}{_point(low % scale, scale - 1, places)}"]
    if first + 1 < last:
        parts.append(f"(?:{_whole(first + 1, last - 1)}){_point(0, scale - 1, places)}")
    parts.append(f"{last}{_point(0, high % scale, places)}")
    return "|".join(parts)


def _point(low: int, high: int, places: int) -> str:
    """Return the pattern of what may follow the digits before the point."""
    if places == 0:
        return ""
    digits = "|".join(_digits(str(low).zfill(places), str(high).zfill(places)))
    return f"(?:\\.(?:{digits})){'?' if low == 0 else ''}"


def _digits(low: str, high: str) -> list[str]:
    """Return patterns of one to so many digits that are between two texts, filled with zeros."""
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [f"{first}{_more(low[1:], high[1:])}"]
    found = []
    if low[1:].strip("0"):
        found.append(f"{first}{_more(low[1:], '9' * rest)}")
        first += 1
    if high[1:].strip("9"):
        found.append(f"{last}{_more('0' * rest, high[1:])}")
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}][0-9]{{0,{rest}}}")
    return found


def _more(low: str, high: str) -> str:
    """Return the pattern of further digits; none are zeros."""
    if not low:
        return ""
    if not low.strip("0") and not high.strip("9"):
        return f"[0-9]{{0,{len(low)}}}"
    return f"(?:{'|'.join(_digits(low, high))}){'' if low.strip('0') else '?'}"


def _whole(low: int, high: int) -> str:
    """Return the pattern of the whole numbers from `low` to `high`."""
    found = []
    while low <= high:
        top = min(high, 10 ** len(str(low)) - 1)
        found += _same_length(str(low), str(top))
        low = top + 1
    return "|".join(found)


def _same_length(low: str, high: str) -> list[str]:
    """Return patterns of the numbers between two of the same number of digits."""
    if low == high:
        return [low]
    rest = len(low) - 1
    if low[0] == high[0]:
        return [f"{low[0]}(?:{'|'.join(_same_length(low[1:], high[1:]))})"]
    first, last = int(low[0]), int(high[0])
    found = []
    if low[1:].strip("0"):
        found.append(f"{first}(?:{'|'.join(_same_length(low[1:], '9' * rest))})")
        first += 1
    if high[1:].strip("9"):
        found.append(f"{last}(?:{'|'.join(_same_length('0' * rest, high[1:]))})")
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return found
