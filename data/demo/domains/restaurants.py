"""Restaurants: their chefs, dishes and reservations."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, amount, day, integer, person, pick, title

RESTAURANTS = Domain(
    "restaurants",
    (
        Table("restaurants", "restaurant", 50, (
            key("restaurant_id"), label("restaurant_name", title("Golden Little Blue Rustic Lucky Old Green Happy Stone",
                                                                 "Spoon Olive Table Kitchen Garden Oven Fork Lantern")),
            category("cuisine", pick("italian", "japanese", "indian", "mexican", "french")), category("city", pick(*CITIES[:5])),
            level("rating", amount(2.1, 4.9, 1), "REAL", null=0.12), date("opening_date", day(1995, 2022)),
        )),
        Table("chefs", "chef", 70, (
            key("chef_id"), label("chef_name", person()), ref("restaurant_id", "restaurants"),
            category("chef_role", pick("line cook", "sous chef", "head chef", "pastry chef")),
            measure("wage", amount(24000, 88000, 0)), level("experience", integer(1, 35)),
        )),
        Table("dishes", "dish", 200, (
            key("dish_id"), label("dish_name", title(
                "Grilled Smoked Spicy Roasted Creamy Crispy Fresh Braised Sweet Pickled Baked Stuffed Glazed Tangy Herbed",
                "Salmon Tofu Noodles Risotto Lamb Salad Dumplings Curry Tacos Soup Mushrooms Duck Lentils Pasta Prawns")),
            ref("restaurant_id", "restaurants"), category("course", pick("main", "starter", "dessert", "side")),
            measure("price", amount(4, 48)), level("calorie_count", integer(90, 1350), null=0.2),
        )),
        Table("reservations", "reservation", 240, (
            key("reservation_id"), ref("restaurant_id", "restaurants"), label("guest_name", person()),
            category("reservation_status", pick("confirmed", "cancelled", "no show", "waiting")),
            measure("party_size", integer(1, 12), "INTEGER"), date("reservation_date", day(2022, 2024)),
        )),
    ),
)  # fmt: skip
