"""Makes text of other processes harmless to show.

Names of processes and files and texts of exceptions are escaped: no escape sequence, line break,
control character or mark for text direction may reach a terminal, a log or an exception. On the
wire, the core's `requests.py` refuses such text.
"""

from collections.abc import Iterable
from difflib import get_close_matches

#: Longest text of one field of a message.
TEXT_MAX_CHARS = 200


def problem_with_text(what: str, text: str) -> str | None:
    """Return why no message may have `text` as its `what`, for the sender; None if one may."""
    if len(text) > TEXT_MAX_CHARS:
        return f"{what} has {len(text)} characters; at most {TEXT_MAX_CHARS}"
    if not text.isprintable():
        return f"{what} is {text!r}, and may have printable characters only"
    return None


def plain(text: str) -> str:
    r"""Return one line that is safe to show, with escapes like \x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def meant(name: str, names: Iterable[str], otherwise: str = "there are") -> str:
    """Return a hint for an unknown name: the nearest of `names`, else all."""
    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}?" if near else f"{otherwise}: {', '.join(names)}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def reason(error: Exception) -> str:
    """Return the text of an error in one short line, safe to show."""
    said = plain(str(error))
    return said if len(said) <= 2 * TEXT_MAX_CHARS else f"{said[: 2 * TEXT_MAX_CHARS]}..."


def plain_lines(text: str) -> str:
    """Like `plain`, but keep the line breaks."""
    return "\n".join(map(plain, text.split("\n")))


def plain_json(text: str) -> str:
    """Return equivalent JSON whose strings are safe to show."""
    return "\n".join(
        line if line.isprintable() else "".join(map(_in_json, line)) for line in text.split("\n")
    )


def _in_json(c: str) -> str:
    if c.isprintable():
        return c
    units = c.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
