"""Every error has one answer for the client: the table is complete and says nothing of what is not there."""

import inspect

import pytest

from pdserve import errors
from pdserve.errors import CapacityError, InvalidField, PdserveError
from pdserve.gateway.errors import TABLE, failure_of, failure_of_worker
from pdserve.ids import Incarnation, RequestId
from pdserve.wire.cluster import Failed, FailureKind


def leaves(root: type[PdserveError]) -> set[type[PdserveError]]:
    children = root.__subclasses__()
    return {leaf for child in children for leaf in leaves(child)} if children else {root}


def own_leaves() -> set[type[PdserveError]]:
    """Those that pdserve defines; a test may define others."""
    return {leaf for leaf in leaves(PdserveError) if leaf.__module__.startswith("pdserve.")}


def test_error_table_has_exactly_the_leaves_of_the_tree() -> None:
    assert set(TABLE) == own_leaves()


def test_error_tree_docstring_names_every_class() -> None:
    classes = [name for name, _ in inspect.getmembers(errors, inspect.isclass)]
    assert classes
    assert [name for name in classes if f"{name} " not in (errors.__doc__ or "") + " "] == ["PdserveError"]


@pytest.mark.parametrize("leaf", TABLE)
def test_error_status_fits_who_is_to_blame(leaf: type[PdserveError]) -> None:
    row = TABLE[leaf]
    is_clients_fault = issubclass(leaf, errors.RequestError | errors.AuthenticationError)
    assert (row.type == "invalid_request_error") == is_clients_fault
    assert (400 <= row.status < 500) == (is_clients_fault or leaf is CapacityError)


def test_failure_of_a_field_error_names_the_field_in_openai_form() -> None:
    failure = failure_of(InvalidField("'n' is wrong", param="n"))
    assert failure.status == 400
    assert failure.body == {
        "error": {"message": "'n' is wrong", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert failure.headers == {}


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.0, "1"), (0.2, "1"), (3.0, "3"), (3.1, "4")])
def test_failure_of_a_full_worker_says_when_to_come_back(retry_after_s: float, header: str) -> None:
    failure = failure_of(CapacityError("full", retry_after_s=retry_after_s))
    assert (failure.status, failure.headers) == (429, {"Retry-After": header})


@pytest.mark.parametrize("kind", FailureKind)
def test_failure_of_a_worker_has_a_status_for_every_kind(kind: FailureKind) -> None:
    failed = Failed(sender=Incarnation(1), request_id=RequestId("r"), kind=kind, message="m")
    assert (
        failure_of_worker(failed).status
        == {
            FailureKind.CAPACITY: 429,
            FailureKind.TIMEOUT: 504,
            FailureKind.INVALID: 400,
            FailureKind.INTERNAL: 500,
            FailureKind.SHUTTING_DOWN: 503,
        }[kind]
    )
