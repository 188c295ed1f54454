r"""Formats of strings as patterns, where the library's own rules let other texts pass: raw quotes in JSON pointers,
escapes such as \q in e-mail addresses, numbers such as 091 in IP addresses, and the 31st of February."""

from __future__ import annotations

_DAYS = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_DAYS = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DATE = f"({_DAYS}|{_LEAP_DAYS})"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?(Z|[+-]{_HOUR}:[0-5][0-9])"

_WORD = "[a-zA-Z0-9_!#$%&'*+/=?^`{|}~-]+"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(  # of eight groups, the last two also as IPv4; one run of groups of zeros may be left out
    [
        f"({_HEX}:){{7}}{_HEX}|({_HEX}:){{1,7}}:|:((:{_HEX}){{1,7}}|:)|({_HEX}:){{6}}{_IPV4}|:(:{_HEX}){{0,5}}:{_IPV4}",
        *(f"({_HEX}:){{{num}}}(:{_HEX}){{1,{7 - num}}}" for num in range(1, 7)),
        *(f"({_HEX}:){{{num}}}(:{_HEX}){{0,{5 - num}}}:{_IPV4}" for num in range(1, 6)),
    ]
)
_POINTER = "(/([^/~]|~[01])*)*"

PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_WORD}(\.{_WORD})*@{_LABEL}(\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}
