"""Prices, stock, types, zones and images of the local cloud's ECS API."""

from datetime import UTC, datetime, timedelta

import pytest

from inventory.localcloud.ecs import catalogue, offers
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters
from tests.support.fake_machines import FakeMachines

A10 = "ecs.gn7i-c8g1.2xlarge"
ZONE = "cn-hangzhou-h"


@pytest.fixture
def cloud(tmp_path):
    return EmulatedCloud(tmp_path / "world.json", FakeMachines(tmp_path))


def asked(**flat):
    return Parameters({"RegionId": "cn-hangzhou"} | {name.replace("__", "."): str(v) for name, v in flat.items()})


def refusal(does, cloud, **flat):
    with pytest.raises(ApiError) as refused:
        does(cloud, asked(**flat))
    return refused.value.status, refused.value.code


def price(cloud, **flat):
    return offers.describe_price(cloud, asked(**flat))["PriceInfo"]["Price"]


def test_a_machine_on_demand_costs_its_list_price_and_its_disks(cloud):
    told = price(
        cloud,
        InstanceType=A10,
        ZoneId=ZONE,
        SystemDisk__Category="cloud_essd",
        SystemDisk__Size=60,
        DataDisk__1__Category="cloud_essd",
        DataDisk__1__PerformanceLevel="PL1",
        DataDisk__1__Size=120,
        InternetMaxBandwidthOut=50,
    )
    parts = {part["Resource"]: part["TradePrice"] for part in told["DetailInfos"]["DetailInfo"]}
    assert parts == {"instanceType": 9.53, "systemDisk": 0.0833, "dataDisk": 0.1667, "bandwidth": 0}
    assert told["TradePrice"] == told["OriginalPrice"] == pytest.approx(9.78)
    assert told["Currency"] == "CNY"


def test_a_spot_machine_costs_between_a_tenth_and_all_of_the_list_price(cloud):
    told = price(cloud, InstanceType=A10, ZoneId=ZONE, SpotStrategy="SpotAsPriceGo")
    assert 0.953 <= told["TradePrice"] < 9.53 == told["OriginalPrice"]
    unprotected = price(cloud, InstanceType=A10, ZoneId=ZONE, SpotStrategy="SpotAsPriceGo", SpotDuration=0)
    assert unprotected["TradePrice"] == pytest.approx(0.9 * told["TradePrice"], abs=0.002)


def test_a_spot_price_does_not_jump_when_an_hour_begins():
    begins = 500_000 * 3600
    before, after = (catalogue.spot_price(A10, ZONE, at) for at in (begins - 1, begins + 1))
    assert abs(after - before) < 0.005
    assert len({catalogue.spot_price(A10, ZONE, begins + 3600 * hour) for hour in range(24)}) > 20


def test_a_spot_price_moves_on_demand_and_stays_below_the_list_price(cloud):
    before = offers.spot_price_now(cloud, A10, ZONE)
    cloud.account.price_factor[A10] = 1.5
    assert offers.spot_price_now(cloud, A10, ZONE) == pytest.approx(1.5 * before, abs=0.002)
    cloud.account.price_factor[A10] = 100
    assert offers.spot_price_now(cloud, A10, ZONE) == 9.53


def test_a_disk_has_a_price_by_the_hour(cloud):
    disk = {"ResourceType": "disk", "DataDisk__1__Category": "cloud_essd", "DataDisk__1__Size": 120}
    assert price(cloud, **disk)["TradePrice"] == pytest.approx(120 / 720, abs=0.001)


@pytest.mark.parametrize(
    ("flat", "code"),
    [
        ({"InstanceType": "ecs.none"}, "InvalidInstanceType.ValueNotSupported"),
        (
            {"InstanceType": A10, "DataDisk__1__Category": "cloud_essd", "DataDisk__1__Size": 1},
            "InvalidDataDiskSize.ValueNotSupported",
        ),
        ({}, "MissingParameter.InstanceType"),
    ],
)
def test_a_price_of_what_is_not_sold_is_refused(cloud, flat, code):
    assert refusal(offers.describe_price, cloud, **flat) == (400, code)


def history(cloud, **flat):
    found, offset = [], 0
    while True:
        answer = offers.describe_spot_price_history(
            cloud, asked(NetworkType="vpc", InstanceType=A10, Offset=offset, **flat)
        )
        found += answer["SpotPrices"]["SpotPriceType"]
        offset = answer["NextOffset"]
        if not offset:
            return found


def iso(moment):
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_the_price_history_has_each_hour_of_each_zone_once_over_its_pages(cloud):
    now = datetime.fromtimestamp(cloud.now(), UTC)
    found = history(cloud, StartTime=iso(now - timedelta(hours=72)))
    assert len({(each["ZoneId"], each["Timestamp"]) for each in found}) == len(found) == 72 * 3
    assert [each["Timestamp"] for each in found] == sorted(each["Timestamp"] for each in found)
    assert all(0.1 * each["OriginPrice"] - 1e-9 <= each["SpotPrice"] <= each["OriginPrice"] == 9.53 for each in found)
    assert len({each["SpotPrice"] for each in found}) > 50


def test_the_price_history_is_of_three_hours_where_nothing_is_said_and_ends_with_todays_price(cloud):
    found = history(cloud, ZoneId=ZONE)
    assert len(found) == 3
    assert found[-1]["SpotPrice"] == pytest.approx(offers.spot_price_now(cloud, A10, ZONE), rel=0.1)
    assert history(cloud, ZoneId=ZONE) == found


def test_the_price_history_goes_back_thirty_days_and_no_further(cloud):
    now = datetime.fromtimestamp(cloud.now(), UTC)
    assert len(history(cloud, ZoneId=ZONE, StartTime=iso(now - timedelta(days=30)))) == 30 * 24
    more = {"NetworkType": "vpc", "InstanceType": A10}
    does = offers.describe_spot_price_history
    early = refusal(does, cloud, StartTime=iso(now - timedelta(days=32)), **more)
    assert early == (400, "InvalidParams.StartTime")
    assert refusal(does, cloud, ZoneId="cn-hangzhou-z", **more) == (404, "InvalidZoneId.NotFound")


def test_spot_advice_ranks_zones(cloud):
    answer = offers.describe_spot_advice(cloud, Parameters({"RegionId": "cn-hangzhou", "InstanceTypes.1": A10}))
    zones = answer["AvailableSpotZones"]["AvailableSpotZone"]
    assert [zone["ZoneId"] for zone in zones] == ["cn-hangzhou-h", "cn-hangzhou-i", "cn-hangzhou-j"]
    advice = [zone["AvailableSpotResources"]["AvailableSpotResource"][0] for zone in zones]
    assert all(10 <= each["AverageSpotDiscount"] <= 100 for each in advice)
    assert all(each["InterruptRateDesc"] in ("0-3%", "3-5%", "5-10%", "10-100%") for each in advice)
    assert len({each["InterruptionRate"] for each in advice}) == 3


def stock(cloud, **flat):
    answer = offers.describe_available_resource(cloud, asked(**flat))
    return {
        zone["ZoneId"]: {
            each["Value"]: each["StatusCategory"]
            for each in zone["AvailableResources"]["AvailableResource"][0]["SupportedResources"]["SupportedResource"]
        }
        for zone in answer["AvailableZones"]["AvailableZone"]
    }


def test_gpu_machines_are_out_of_stock_and_local_ones_in_stock(cloud):
    (there,) = stock(cloud, DestinationResource="InstanceType", ZoneId=ZONE).values()
    assert there[A10] == "WithoutStock"
    assert {name for name, status in there.items() if status == "WithStock"} == {
        "ecs.local.small",
        "ecs.local.medium",
    }
    cloud.account.stocked.append(A10)
    assert stock(cloud, DestinationResource="InstanceType", InstanceType=A10)[ZONE] == {A10: "WithStock"}
    assert catalogue.in_stock(A10, cloud.account.stocked)


def test_a_type_that_is_unknown_is_nowhere(cloud):
    assert stock(cloud, DestinationResource="InstanceType", InstanceType="ecs.none") == {}


def test_newer_gpu_machines_take_only_disks_of_the_essd_family(cloud):
    of_a10 = stock(cloud, DestinationResource="DataDisk", InstanceType=A10, ZoneId=ZONE)
    assert set(of_a10[ZONE]) == {"cloud_essd", "cloud_auto"}
    assert "cloud_efficiency" in stock(cloud, DestinationResource="DataDisk", InstanceType="ecs.local.small")[ZONE]


def test_instance_types_are_told_as_the_vendor_counts(cloud):
    (told,) = offers.describe_instance_types(cloud, Parameters({"InstanceTypes.1": A10}))["InstanceTypes"][
        "InstanceType"
    ]
    assert (told["CpuCoreCount"], told["MemorySize"], told["GPUAmount"]) == (8, 30.0, 1)
    assert (told["GPUSpec"], told["GPUMemorySize"]) == ("NVIDIA A10", 24.0)
    assert told["InstanceBandwidthRx"] == 16_384_000
    assert told["InstanceTypeFamily"] == "ecs.gn7i"


def test_instance_types_come_in_pages(cloud):
    names, token = [], ""
    while True:
        answer = offers.describe_instance_types(cloud, Parameters({"MaxResults": "7", "NextToken": token}))
        names += [each["InstanceTypeId"] for each in answer["InstanceTypes"]["InstanceType"]]
        token = answer["NextToken"]
        if not token:
            break
    assert names == list(catalogue.TYPES)


def test_the_image_is_found_by_id_and_by_family_and_says_what_it_is(cloud):
    (by_family,) = catalogue.describe_images(cloud, asked(ImageFamily="acs:ubuntu_22_04_x64"))["Images"]["Image"]
    by_id = catalogue.describe_images(cloud, asked(ImageId=by_family["ImageId"]))["Images"]["Image"]
    assert by_family["ImageFamily"] == "acs:ubuntu_22_04_x64"
    assert [each["ImageId"] for each in by_id] == [by_family["ImageId"]]
    assert "Debian 12" in by_family["OSName"]
    assert catalogue.describe_images(cloud, asked(ImageFamily="acs:none"))["TotalCount"] == 0
    assert catalogue.describe_images(cloud, asked(ImageId="m-none"))["TotalCount"] == 0


def test_zones_are_those_of_the_region_that_is_asked_for():
    assert catalogue.zones("ap-southeast-5") == ("ap-southeast-5-h", "ap-southeast-5-i", "ap-southeast-5-j")
