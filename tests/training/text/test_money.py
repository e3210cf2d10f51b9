"""Money: the same text everywhere, and no other way to it."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.amount import Amount
from training.text.counts import HOUR, MONTH, added, money

ROOT = Path(__file__).parents[3]
FILES = [
    path
    for folder in ("inventory", "snapshots", "deploy", "training")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path not in (ROOT / "training" / "money.py", ROOT / "inventory" / "renting" / "tags.py")  # a tag is read again
]
AMOUNTS = re.compile(r"price|trade|cost|budget|spent|paid|money|committed|spot\.(low|middle|high)|\b(hour|month)\b")
"""What expressions of money are made of here."""


@pytest.mark.parametrize(
    ("amount", "currency", "per", "text"),
    [
        (None, "CNY", "", ""),
        (2, "CNY", "", "2.00 CNY"),
        (2, "", "", "2.00"),
        (121.004, "CNY", MONTH, "121.00 CNY a month"),
        (5.1267, "CNY", HOUR, "5.1267 CNY an hour"),
        (5.1, "CNY", HOUR, "5.10 CNY an hour"),
        (20, "", HOUR, "20.00 an hour"),
        (0.00418, "USD", HOUR, "0.0042 USD an hour"),
        (-0.001, "CNY", "", "0.00 CNY"),
        (0, "CNY", MONTH, "0.00 CNY a month"),
        (1e-7, "CNY", MONTH, "<0.01 CNY a month"),
        (0.005, "", "", "<0.01"),
        (0.0051, "", "", "0.01"),
        (0.00004, "CNY", HOUR, "<0.0001 CNY an hour"),
    ],
)
def test_an_amount_has_its_currency_and_what_it_is_for(amount, currency, per, text):
    assert money(amount, currency, per) == text


def test_what_is_shown_adds_up_to_its_last_digit():
    amounts = [0.005, 1.114, 1.114, 1.114]
    shown = sum(float(money(amount)) for amount in amounts[1:])
    assert money(added(amounts)) == money(shown) == "3.33"


def test_amounts_too_small_to_be_shown_are_a_sum_all_the_same():
    assert money(added(iter([0.004]))) == "<0.01"
    assert money(added([0.004, 0.004])) == "0.01"
    assert money(added([])) == "0.00"


def by_hand(source):
    """The expressions of amounts that a text writes out by a format of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            how, what = ast.unparse(node.format_spec), ast.unparse(node.value)
            if re.search(r"[fg]'?$", how.rstrip("\"'") + "'") and AMOUNTS.search(what):
                yield what


def test_no_amount_is_written_out_by_hand():
    found = {f"{path.relative_to(ROOT)}: {what}" for path in FILES for what in by_hand(path.read_text("utf-8"))}
    assert found == set()


def test_a_price_of_the_tests_lets_nobody_else_write_it_out(monkeypatch):
    """The cloud in memory and the tables of test_tables.py have such prices: what is printed of them went through
    here."""
    price = Amount(12.3456)
    assert money(price, "CNY", HOUR) == "12.3456 CNY an hour" and money(added([price, 2 * price])) == "37.04"
    assert f"{price / Amount(2):.0%}" == "617%"
    shares = [price, 4 * price, price * 2.5, price + 1, 1 - price, price / 3, round(price, 2), sum([price, price])]
    monkeypatch.setitem(globals(), "__name__", "inventory.renting.report")
    for amount in shares:
        for write in (lambda x: f"{x}", lambda x: f"{x:.2f}", lambda x: str(x), lambda x: "{:.2f}".format(x)):  # noqa: UP032, PLW0108
            with pytest.raises(AssertionError, match="by hand"):
                write(amount)


def test_an_amount_written_out_by_hand_is_found():
    assert list(by_hand('f"{best.price.trade:.2f} CNY"')) == ["best.price.trade"]
    assert list(by_hand('f"{budget:g} a month"')) == ["budget"]
    assert not list(by_hand('f"{rows:.1f} {name}"'))
