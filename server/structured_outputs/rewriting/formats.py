"""The formats that are asserted, as patterns; any other `format` is an annotation.

JSON Schema 2020-12 (Validation, 7.2) leaves to the implementation which it asserts. The patterns
are of ASCII and, where the format's RFC is wide, of its common part: every text that matches is of
the format.
"""

from __future__ import annotations

_DATE = (
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
# Years that no century divides; the leap day of centuries is left out.
_LEAP = r"[1-9][0-9](?:0[48]|[2468][048]|[13579][26])-02-29"
_DAY = rf"(?:{_DATE}|{_LEAP})"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        rf"::(?:{_GROUP}:){{0,6}}{_GROUP}",
        *(rf"(?:{_GROUP}:){{{n}}}(?::{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)),
        rf"(?:{_GROUP}:){{1,7}}:",
        "::",
    )
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_SPAN = r"[0-9]{1,9}"
_CLOCK_SPAN = rf"T(?:{_SPAN}H(?:{_SPAN}M(?:{_SPAN}S)?)?|{_SPAN}M(?:{_SPAN}S)?|{_SPAN}S)"
_DAY_SPAN = rf"(?:{_SPAN}Y(?:{_SPAN}M(?:{_SPAN}D)?)?|{_SPAN}M(?:{_SPAN}D)?|{_SPAN}D)"
_DURATION = rf"P(?:{_DAY_SPAN}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|{_SPAN}W)"
_URI_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = rf"(?:/{_URI_CHAR}*)*"
_TAIL = rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
_HOST_PORT = rf"{_HOST}(?::[0-9]{{1,5}})?"
_URI = (
    rf"(?:[A-Za-z][A-Za-z0-9+.-]{{0,11}}://{_HOST_PORT}{_PATH}{_TAIL}"
    rf"|(?:urn|mailto|tel|data):{_URI_CHAR}+)"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,21}"

FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": rf"{_DAY}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|{_PATH}{_TAIL})",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}
"""Pattern of the whole text, by the name of its format."""
