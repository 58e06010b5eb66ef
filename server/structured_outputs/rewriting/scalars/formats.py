"""Patterns of the asserted formats; any other `format` is an annotation.

JSON Schema 2020-12 (Validation, 7.2) lets the implementation choose. Every text that matches a
pattern has the format by its RFC. For wide RFCs, the pattern covers the common part.
"""

from __future__ import annotations

_DATE = (
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_DAY = rf"(?:{_DATE}|{_LEAP_YEAR}-02-29)"
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
# At most 63 characters. Hyphens in both the third and the fourth place mark A-labels
# (RFC 5890, 2.3.1), whose rest must be Punycode; they are excluded.
_END = "[A-Za-z0-9]"
_MIDDLE = "[A-Za-z0-9-]"
_LABEL = (
    rf"{_END}(?:{_END}|{_MIDDLE}(?:{_END}(?:{_MIDDLE}{{0,59}}{_END})?"
    rf"|-{_END}(?:{_MIDDLE}{{0,58}}{_END})?))?"
)
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
# Left-to-right letters that IDNA 2008 (RFC 5892) allows anywhere. Ten of them are at most 63
# characters of Punycode.
_LETTERS = (
    r"\u00e0-\u00f6\u00f8-\u00ff\u03b1-\u03c1\u03c3-\u03c9\u0430-\u044f"
    r"\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_IDN_LABEL = rf"(?:{_LABEL}|[a-z0-9{_LETTERS}]{{1,10}})"
_SPAN = r"[0-9]{1,9}"
_CLOCK_SPAN = rf"T(?:{_SPAN}H(?:{_SPAN}M(?:{_SPAN}S)?)?|{_SPAN}M(?:{_SPAN}S)?|{_SPAN}S)"
_DAY_SPAN = rf"(?:{_SPAN}Y(?:{_SPAN}M(?:{_SPAN}D)?)?|{_SPAN}M(?:{_SPAN}D)?|{_SPAN}D)"
_DURATION = rf"P(?:{_DAY_SPAN}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|{_SPAN}W)"
_ATOM = r"A-Za-z0-9!#$%&'*+/=?^_`{|}~\-"
# At most 64 characters.
_LOCAL = (
    rf"(?:[{_ATOM}]{{1,64}}|[{_ATOM}]{{1,31}}\.[{_ATOM}]{{1,32}}"
    rf"|[{_ATOM}]{{1,15}}(?:\.[{_ATOM}]{{1,15}}){{2,3}})"
)
_PORT = r"(?:[1-9]?[0-9]{1,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_UNRESERVED = r"A-Za-z0-9._~\-"
_CHARACTERS = rf"{_UNRESERVED}!$&'()*+,;=:@"
_UCS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_ESCAPE = "%[0-9A-Fa-f]{2}"


def _uri(characters: str, host: str) -> tuple[str, str]:
    """Return the patterns of URIs and URI references (RFC 3986); paths have `characters`."""
    one = rf"(?:[{characters}]|{_ESCAPE})"
    # The first segment of a path has no colon, which would end a scheme.
    first = rf"(?:[{characters.replace(':', '')}]|{_ESCAPE})"
    path = rf"(?:/{one}*)*"
    absolute = rf"/(?:{one}+{path})?"
    tail = rf"(?:\?(?:{one}|[/?])*)?(?:#(?:{one}|[/?])*)?"
    user = rf"(?:(?:[{_UNRESERVED}!$&'()*+,;=:]|{_ESCAPE})+@)?"
    authority = rf"//{user}(?:{host}|\[(?:{_IPV6})\])(?::{_PORT})?"
    whole = (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}{path}|//{absolute}|{absolute}|{one}+{path}){tail}"
    )
    reference = rf"(?:{whole}|(?:{authority}{path}|{absolute}|{first}+{path})?{tail})"
    return whole, reference


def _registered(characters: str) -> str:
    """Return the pattern of host names, which need not be DNS names."""
    label = rf"[{characters}](?:[{characters}\-]*[{characters}])?"
    return rf"{label}(?:\.{label})*"


_URI, _URI_REFERENCE = _uri(_CHARACTERS, _registered("A-Za-z0-9"))
_IRI, _IRI_REFERENCE = _uri(_CHARACTERS + _UCS, _registered("A-Za-z0-9" + _UCS))
_NAME = rf"(?:[A-Za-z0-9_]|{_ESCAPE})+(?:\.(?:[A-Za-z0-9_]|{_ESCAPE})+)*(?::[1-9][0-9]{{0,3}}|\*)?"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": rf"{_DAY}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_LOCAL}@{_LABEL}(?:\.{_LABEL})+",
    "idn-email": rf"(?:{_LOCAL}|[{_ATOM}{_LETTERS}]{{1,21}})@{_IDN_LABEL}(?:\.{_IDN_LABEL}){{1,3}}",
    "hostname": _HOST,
    "idn-hostname": rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": rf"(?:[{_CHARACTERS}/?#]|{_ESCAPE}|\{{[+#./;?&]?{_NAME}(?:,{_NAME})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]?)(?:#|{_POINTER})",
}
"""Pattern of the whole text by format."""
FORMAT_LENGTHS = {"email": 254, "idn-email": 120, "hostname": 253, "idn-hostname": 120}
"""Most characters of a text, for formats whose pattern has no bound."""
WIDE_FORMATS = {
    "date": r"[0-9W-]*",
    "time": r"[0-9:.,Zz+-]*",
    "date-time": r"[0-9W-]*[Tt _][0-9:.,Zz+-]*",
    "duration": r"P[0-9.,YMWDTHS]*",
    "email": r'(?s:".*|[^:]*)@(?s:.*)',
    "idn-email": r'(?s:".*|[^:]*)@(?s:.*)',
    "hostname": r"[A-Za-z0-9._-]*",
    "ipv4": r"[0-9.]*",
    "ipv6": r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%.*)?",
    "uuid": r"[0-9A-Fa-f-]*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(?s:.*)",
    "iri": r"[A-Za-z][A-Za-z0-9+.-]*:(?s:.*)",
    "json-pointer": r"(?:/(?s:.*))?",
    "relative-json-pointer": r"[0-9](?s:.*)",
}
"""Patterns that every text of a format matches, in the widest reading of its RFC."""
