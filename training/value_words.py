"""What a value of cluster.toml or of a recipe should be, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import ErrorDetails

EXPECTED: Mapping[str, str] = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number is expected"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number is expected"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false is expected"),
    "string_type": "a text is expected",
    "finite_number": "a finite number is expected",
    "literal_error": "{expected} is expected",
    "greater_than": "more than {gt:g} is expected",
    "greater_than_equal": "at least {ge:g} is expected",
    "less_than": "less than {lt:g} is expected",
    "less_than_equal": "at most {le:g} is expected",
}
"""By pydantic's types of errors, with what it tells beside them."""


def expected(problem: ErrorDetails) -> str:
    """What is expected in the place of a wrong value; where nobody has worded it, pydantic's message."""
    if words := EXPECTED.get(problem["type"]):
        return words.format(**problem.get("ctx", {}))
    return problem["msg"].removeprefix("Value error, ")
