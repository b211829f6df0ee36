"""An online shop: suppliers, products, buyers and what they order."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, COUNTRIES, amount, code, day, depending, integer, later, person, pick, title

SHOP = Domain(
    "shop",
    (
        Table("suppliers", "supplier", 24, (
            key("supplier_id"), label("supplier_name", title("Alpine Baltic Central Delta Evergreen Fjord Global Harbor",
                                                             "Traders Goods Supply Imports Works")),
            category("country", pick(*COUNTRIES[2:])), level("reliability_score", integer(40, 99)),
        )),
        Table("products", "product", 90, (
            key("product_id"), label("product_name", title(
                "Compact Classic Deluxe Folding Solar Wooden Steel Cotton Smart Mini", "Lamp Chair Kettle Backpack Clock Mug "
                "Speaker Blanket Desk Bottle Camera Basket")), ref("supplier_id", "suppliers"),
            category("product_category", pick("kitchen", "furniture", "electronics", "outdoor", "textiles")),
            measure("price", depending("product_category", {"kitchen": (8, 90), "furniture": (60, 700), "outdoor": (15, 240),
                                                            "electronics": (25, 900), "textiles": (10, 110)})),
            measure("stock", integer(0, 400), "INTEGER"), level("weight", amount(0.1, 25, 1), "REAL", null=0.12),
        )),
        Table("buyers", "buyer", 80, (
            key("buyer_id"), label("buyer_name", person()), category("city", pick(*CITIES[2:])),
            category("loyalty_level", pick("bronze", "silver", "gold")), date("signup_date", day(2016, 2023)),
        )),
        Table("orders", "order", 220, (
            key("order_id"), label("order_number", code("SO", 5)), ref("buyer_id", "buyers"),
            category("order_status", pick("delivered", "shipped", "pending", "returned")),
            category("shipping_method", pick("standard", "express", "pickup")), date("order_date", day(2021, 2024)),
            date("delivery_date", later("order_date", 1, 21), null=0.3),
        )),
        Table("order_items", "order item", 300, (
            key("order_item_id"), ref("order_id", "orders"), ref("product_id", "products"),
            measure("quantity", integer(1, 9), "INTEGER"), measure("discount", amount(0, 40, 1), null=0.4),
        )),
    ),
)  # fmt: skip
