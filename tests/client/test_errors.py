"""Every refusal is an exception with the daemon's words and code, and all are SwapdError."""

import typing
from types import ModuleType

import pytest

import swapd
import swapd_client
from swapd.shared.protocol import Code, Goodbye, Refused
from swapd_client import errors
from swapd_client.errors import SwapdError

CODES: tuple[Code, ...] = typing.get_args(Code)


def test_every_code_has_an_exception_class() -> None:
    assert set(errors.BY_CODE) == set(CODES)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", ["refused", "goodbye"])
def test_a_refusal_becomes_the_exception_of_its_code_with_its_message(
    code: Code, kind: str
) -> None:
    why = "the daemon's own words"
    refusal = Refused(1, code, why) if kind == "refused" else Goodbye(code, why)
    error = errors.from_refusal(refusal)
    assert type(error) is errors.BY_CODE[code]
    assert (str(error), error.code) == (why, code)


def test_only_a_fault_of_the_daemon_is_the_base_class() -> None:
    assert [code for code in CODES if errors.BY_CODE[code] is SwapdError] == ["internal"]


@pytest.mark.parametrize("old", errors.RENAMED)
@pytest.mark.parametrize("module", [swapd, swapd_client])
def test_the_name_of_before_tells_the_new_one(module: ModuleType, old: str) -> None:
    new = errors.RENAMED[old]
    assert hasattr(swapd_client, new)
    with pytest.raises(ImportError, match=f"{new} now"):
        getattr(module, old)


def public() -> list[type[SwapdError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, SwapdError)]


@pytest.mark.parametrize("error", public())
def test_every_exception_is_exported_and_says_when_it_is_raised(error: type[SwapdError]) -> None:
    assert getattr(swapd_client, error.__name__) is error
    assert error.__name__ in swapd_client.__all__
    assert error.__doc__
    assert error.__doc__ != SwapdError.__doc__ or error is SwapdError


def test_what_python_has_a_class_for_is_that_too() -> None:
    """So that code which knows nothing of swapd can catch it."""
    assert issubclass(errors.Timeout, TimeoutError)
    assert issubclass(errors.InvalidSource, ValueError)


def test_every_end_of_a_session_is_caught_as_one() -> None:
    for code in ("no_session", "stopping", "fenced"):
        assert issubclass(errors.BY_CODE[code], errors.SessionEnded)
    assert not issubclass(errors.NotRunning, errors.SessionEnded)
    assert errors.SessionEnded not in errors.BY_CODE.values()


def test_a_session_that_the_daemon_ended_is_not_taken_for_a_daemon_that_is_gone() -> None:
    """The daemon goes on, and other sessions may have had the memory."""
    assert not issubclass(errors.SessionFenced, errors.DaemonGone)
    assert not issubclass(errors.DaemonGone, errors.SessionFenced)
