"""Air travel: airlines, airports, planes, flights between two airports, and bookings."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import COUNTRIES, amount, code, day, integer, listed, person, pick, title

_AIRPORTS = (
    "Northfield", "Lakeside", "Stonebridge", "Clearwater", "Eastport", "Sandhaven", "Bluehill", "Kingsford", "Maplewood",
    "Silverdale", "Oakridge", "Rosemount", "Windermere", "Fairview", "Greyrock", "Highgate", "Longmeadow", "Ashford",
    "Brookfield", "Westmoor", "Palmcove", "Ironbay", "Redcliff", "Summerton",
)  # fmt: skip
FLIGHTS = Domain(
    "flights",
    (
        Table("airlines", "airline", 20, (
            key("airline_id"), label("airline_name", title("Sky Polar Trans Coastal Royal Swift Star", "Air Wings Jet Lines")),
            category("country", pick(*COUNTRIES[:5])), level("founded_year", integer(1946, 2012)),
            category("alliance", pick("Blue", "Orbit", "Union"), null=0.3),
        )),
        Table("airports", "airport", 24, (
            key("airport_id"), label("airport_name", listed(*_AIRPORTS)), category("continent", pick("Europe", "Asia", "America")),
            level("elevation", integer(2, 1900)), measure("gate_count", integer(4, 120), "INTEGER"),
        )),
        Table("planes", "plane", 60, (
            key("plane_id"), label("tail_number", code("N", 4)), ref("airline_id", "airlines"),
            category("manufacturer", pick("Airbus", "Boeing", "Embraer")), measure("seat_count", integer(70, 380), "INTEGER"),
            date("last_service_date", day(2021, 2024), null=0.1),
        )),
        Table("flights", "flight", 200, (
            key("flight_id"), label("flight_number", code("FC", 4)), ref("plane_id", "planes"),
            ref("origin_airport_id", "airports", "origin airport"),
            ref("destination_airport_id", "airports", "destination airport"), measure("distance", integer(180, 9800), "INTEGER"),
            date("departure_date", day(2022, 2024)), measure("delay", integer(5, 240), "INTEGER", null=0.45),
        )),
        Table("bookings", "booking", 260, (
            key("booking_id"), ref("flight_id", "flights"), label("passenger_name", person()),
            category("cabin_class", pick("economy", "business", "first")),
            measure("ticket_price", amount(45, 2200)), date("booking_date", day(2021, 2024)),
        )),
    ),
)  # fmt: skip
