"""Regular expressions of the decimal numbers of a range.

llguidance's are narrower: up to 0.95 they match 0.90, but not 0.9.
"""

from __future__ import annotations

from collections.abc import Iterator


def decimals(low: int, high: int, places: int) -> str:
    """Return the pattern of the numbers from `low` to `high` with at most `places` decimal places.

    `low` and `high` are not negative and in units of the last place. Numbers have no leading zeros
    except before the point, and may have trailing zeros.
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
    """Return the pattern of the part after the integer digits."""
    if places == 0:
        return ""
    digits = "|".join(_digits(str(low).zfill(places), str(high).zfill(places)))
    return f"(?:\\.(?:{digits})){'?' if low == 0 else ''}"


def _digits(low: str, high: str) -> list[str]:
    """Return patterns of the digits between two texts; missing digits count as zeros."""
    return [f"{first}{_more(*ends)}" for first, *ends in _by_first_digit(low, high)]


def _more(low: str, high: str) -> str:
    """Return the pattern of further digits; missing digits count as zeros."""
    if not low:
        return ""
    if _is_any(low, high):
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
    """Return patterns of the numbers between two with equally many digits."""
    return [f"{first}{_exactly(*ends)}" for first, *ends in _by_first_digit(low, high)]


def _exactly(low: str, high: str) -> str:
    """Return the pattern of further digits, equally many as the two have."""
    if low == high:
        return low
    if _is_any(low, high):
        return f"[0-9]{{{len(low)}}}"
    return f"(?:{'|'.join(_same_length(low, high))})"


def _by_first_digit(low: str, high: str) -> Iterator[tuple[str, str, str]]:
    """Yield patterns of the first digit, each with the bounds of the digits that follow.

    `low` and `high` have equally many digits.
    """
    first, last = int(low[0]), int(high[0])
    zeros, nines = "0" * len(low[1:]), "9" * len(low[1:])
    if first == last:
        yield low[0], low[1:], high[1:]
        return
    if low[1:] != zeros:
        yield low[0], low[1:], nines
        first += 1
    if high[1:] != nines:
        yield high[0], zeros, high[1:]
        last -= 1
    if first <= last:
        yield f"[{first}-{last}]", zeros, nines


def _is_any(low: str, high: str) -> bool:
    """Return True if all sequences of digits are between the two."""
    return not low.strip("0") and not high.strip("9")
