"""Insurance claims: who is insured, what was claimed, what was paid."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, amount, code, day, depending, integer, later, person, pick

INSURANCE = Domain(
    "insurance",
    (
        Table("customers", "customer", 70, (
            key("customer_id"), label("customer_name", person()), category("city", pick(*CITIES[:6])),
            category("segment", pick("private", "business", "student")), date("birth_date", day(1945, 2003)),
        )),
        Table("agents", "agent", 20, (
            key("agent_id"), label("agent_name", person()), category("region", pick("north", "south", "east", "west")),
            date("hire_date", day(2008, 2022)),
        )),
        Table("policies", "policy", 130, (
            key("policy_id"), label("policy_number", code("P", 5)), ref("customer_id", "customers"),
            ref("agent_id", "agents"), category("policy_type", pick("auto", "home", "health", "travel")),
            measure("premium", depending("policy_type", {"auto": (300, 900), "home": (200, 1200), "health": (600, 2400),
                                                         "travel": (40, 260)})),
            date("start_date", day(2018, 2023)), date("cancel_date", later("start_date", 30, 700), null=0.7),
        )),
        Table("claims", "claim", 200, (
            key("claim_id"), ref("policy_id", "policies"), category("status", pick("paid", "open", "rejected", "review")),
            category("cause", pick("accident", "theft", "fire", "water damage", "illness")),
            measure("claim_amount", amount(80, 15000)), date("claim_date", day(2020, 2024)),
            date("settlement_date", later("claim_date", 5, 180), null=0.35),
        )),
        Table("payments", "payment", 150, (
            key("payment_id"), ref("claim_id", "claims"), category("method", pick("transfer", "check", "card")),
            measure("paid_amount", amount(50, 9000)), level("installment", integer(1, 4)),
            date("payment_date", day(2020, 2024)),
        )),
    ),
)  # fmt: skip
