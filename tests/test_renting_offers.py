"""Which type in which zone is tried first."""

from datetime import UTC, datetime, timedelta

from inventory.aliyun_settings import Aliyun
from inventory.cloud.values import SpotAdvice, SpotPrice, Stock
from inventory.renting.offers import Market, price_range, ranked, unknown_types

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def price(kind, zone, value, hours_ago=0):
    return SpotPrice(zone, kind, NOON - timedelta(hours=hours_ago), value)


def wanted(types, zones=()):
    return Aliyun(types=types, zones=zones)


def tried(own, market, **more):
    return [(o.instance_type, o.zone_id) for o in ranked(own, market, **more)]


STOCK = tuple(Stock(zone, kind, True) for kind in ("a", "b") for zone in ("h", "i", "j"))


def test_types_come_in_their_order_and_zones_by_price_then_by_risk():
    prices = (price("a", "h", 3), price("a", "i", 2), price("a", "j", 2), price("b", "h", 1))
    advice = (SpotAdvice("i", "a", 20, 15), SpotAdvice("j", "a", 20, 3))
    order = tried(wanted(("a", "b")), Market(STOCK, prices, advice))
    assert order[:4] == [("a", "j"), ("a", "i"), ("a", "h"), ("b", "h")]


def test_configured_zones_are_taken_in_their_order_whatever_they_cost():
    prices = (price("a", "h", 1), price("a", "j", 9))
    assert tried(wanted(("a",), ("j", "h")), Market(STOCK, prices)) == [("a", "j"), ("a", "h")]


def test_what_has_no_stock_comes_last_and_says_so():
    stock = (Stock("h", "a", False), Stock("i", "b", True))
    offers = ranked(wanted(("a", "b")), Market(stock))
    assert [(o.instance_type, o.reason) for o in offers] == [("b", ""), ("a", "no stock")]


def test_the_zone_where_the_disks_are_goes_before_the_types_order():
    stock = (Stock("h", "a", True), Stock("i", "b", True))
    assert tried(wanted(("a", "b")), Market(stock), home="i") == [("b", "i"), ("a", "h")]


def test_more_machines_are_of_the_type_there_is():
    assert tried(wanted(("a", "b")), Market(STOCK), home="h", same_type="b")[0] == ("b", "h")


def test_a_price_range_has_the_last_price_by_time_and_the_median():
    found = price_range([price("a", "h", 5, 0), price("a", "h", 1, 9), price("a", "h", 2, 5)], "a", "h")
    assert (found.low, found.middle, found.high, found.last) == (1, 2, 5, 5)
    assert price_range([price("a", "h", 5)], "a", "i") is None


def test_types_nobody_sells_there_are_named():
    assert unknown_types(wanted(("a", "x"), ("h",)), Market(STOCK)) == ("x",)
    assert unknown_types(wanted(("a",), ("z",)), Market(STOCK)) == ("a",)
