"""Encodes requests and decodes replies. Errors name the components of the request."""

from swapd.shared.protocol import (
    NOT_A_MESSAGE,
    NOT_ENCODABLE,
    REQUEST_MAX_BYTES,
    AnyReply,
    AnyRequest,
    decode_reply,
    encode,
)
from swapd.shared.units import size
from swapd_client.checks import check_name, check_names
from swapd_client.errors import InvalidArgument, Timeout, VersionMismatch
from swapd_client.session.session import Session

#: Most names in an error message.
NAMED_MAX = 3


def unanswered(session: Session, request: AnyRequest, waited_s: float) -> Timeout:
    return Timeout(f"{_named(request)} is given up: {session.lifeline.not_answering(waited_s)}")


def _named(request: AnyRequest) -> str:
    names = getattr(request, "names", None) or (getattr(request, "name", None),)
    said = [repr(name) for name in names if name is not None]
    more = [f"{len(said) - NAMED_MAX} more"] if len(said) > NAMED_MAX else []
    kind = str(request.__struct_config__.tag).replace("_", " ")
    return f"{kind} of {', '.join(said[:NAMED_MAX] + more)}" if said else kind


def _wrong(request: AnyRequest) -> str:
    """Name the field that cannot be encoded."""
    for field in request.__struct_fields__:
        try:
            encode(value := getattr(request, field))
        except NOT_ENCODABLE:
            return f"{field}={value!r}: "
    return ""


def encoded(request: AnyRequest) -> bytes:
    """Raises: InvalidArgument."""
    check_names(getattr(request, "names", ()))
    for field in ("name", "after"):
        check_name(getattr(request, field, ""), field)
    try:
        data = encode(request)
    except NOT_ENCODABLE as exc:
        raise InvalidArgument(
            f"{_named(request)} cannot be sent: {_wrong(request)}{exc}. Names must be text, and "
            "numbers 64 bits"
        ) from exc
    if len(data) > REQUEST_MAX_BYTES:
        raise InvalidArgument(
            f"{_named(request)} is a request of {size(len(data))}, but may have at most "
            f"{size(REQUEST_MAX_BYTES)}: name fewer components at once"
        )
    return data


def decode(data: bytes) -> AnyReply:
    try:
        reply: AnyReply = decode_reply(data)
    except NOT_A_MESSAGE as exc:
        raise VersionMismatch(
            f"this client does not understand the daemon's answer ({exc}); "
            "install the same version of swapd on both sides"
        ) from exc
    return reply
