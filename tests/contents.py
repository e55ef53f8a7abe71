"""Bytes to register: components with the same bytes share one copy on the device."""


def bytes_of(name: str, nbytes: int) -> bytearray:
    """Return bytes that no other name has."""
    return bytearray(name.encode().ljust(nbytes, b"\0"))
