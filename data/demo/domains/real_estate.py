"""Real estate: brokers, neighborhoods, houses, viewings and sales."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import amount, code, day, depending, integer, listed, person, pick

_STREETS = "Maple Oak Cedar Birch Willow Chestnut Linden Juniper Magnolia Aspen Rowan Hazel".split()
REAL_ESTATE = Domain(
    "real_estate",
    (
        Table("brokers", "broker", 26, (
            key("broker_id"), label("broker_name", person()), category("office", pick("downtown", "harbor", "uptown")),
            level("commission_rate", amount(1, 6, 1), "REAL"), date("start_date", day(2005, 2022)),
        )),
        Table("neighborhoods", "neighborhood", 20, (
            key("neighborhood_id"), label("neighborhood_name", listed(
                "Rosewood", "Greenfield", "Bayview", "Foxhollow", "Stonegate", "Ridgecrest", "Millbrook", "Sunnyside", "Elmwood",
                "Kingsbury", "Ferndale", "Harborview", "Cloverdale", "Briarwood", "Ashgrove", "Westbrook", "Pinehurst",
                "Lakewood", "Thornhill", "Glenmore", "Oldfield", "Springdale")),
            category("zone", pick("city", "suburb", "rural")), level("crime_index", integer(5, 90)),
            measure("population", integer(1200, 48000), "INTEGER"),
        )),
        Table("houses", "house", 140, (
            key("house_id"), label("address", lambda rng, row: f"{rng.randint(1, 180)} {rng.choice(_STREETS)} Street"),
            ref("neighborhood_id", "neighborhoods"), category("house_type", pick("apartment", "townhouse", "villa", "loft")),
            measure("asking_price", depending("house_type", {"apartment": (90000, 420000), "townhouse": (180000, 640000),
                                                             "villa": (450000, 1900000), "loft": (120000, 560000)})),
            level("bedroom_count", integer(1, 6)), level("build_year", integer(1901, 2022), null=0.1),
        )),
        Table("viewings", "viewing", 220, (
            key("viewing_id"), ref("house_id", "houses"), ref("broker_id", "brokers"), label("visitor_name", person()),
            date("viewing_date", day(2022, 2024)), level("interest_score", integer(1, 10), null=0.25),
        )),
        Table("sales", "sale", 80, (
            key("sale_id"), label("contract_number", code("C", 4)), ref("house_id", "houses"), ref("broker_id", "brokers"),
            measure("sale_price", amount(85000, 1600000, 0)), date("sale_date", day(2021, 2024)),
            category("financing", pick("mortgage", "cash", "installments")),
        )),
    ),
)  # fmt: skip
