"""A city library: authors, books, branches, members and their loans."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import amount, day, integer, later, listed, person, pick, title

LIBRARY = Domain(
    "library",
    (
        Table("authors", "author", 40, (
            key("author_id"), label("author_name", person()), category("nationality", pick(
                "German", "Spanish", "Irish", "Japanese", "Brazilian")), level("birth_year", integer(1860, 1925)),
            level("death_year", integer(1950, 2020), null=0.6),
        )),
        Table("books", "book", 120, (
            key("book_id"), label("book_title", title(
                "Forgotten Hidden Last Secret Endless Silent Crooked Amber Frozen Painted Second",
                "Orchard Kingdom Lighthouse Journey Theorem Winter Promise Bridge Empire Daughter Island")),
            ref("author_id", "authors"), category("genre", pick("novel", "mystery", "science", "history", "poetry")),
            measure("page_count", integer(80, 920), "INTEGER"), level("publication_year", integer(1955, 2023)),
        )),
        Table("branches", "branch", 20, (
            key("branch_id"), label("branch_name", listed(*(f"{place} Branch" for place in (
                "Riverside", "Old Town", "Station", "Hillside", "Market", "Parkway", "Lakeview", "Westend", "Northgate",
                "Castle", "Meadow", "Harbor", "Elm Street", "Sunset", "Mill", "Garden", "Abbey", "Campus", "Orchard", "Tower",
                "Bridge", "Chapel")))),
            category("district", pick("center", "north", "south")), measure("seat_count", integer(20, 260), "INTEGER"),
            date("opening_date", day(1960, 2015)),
        )),
        Table("members", "member", 100, (
            key("member_id"), label("member_name", person()),
            category("membership_type", pick("adult", "student", "senior", "child")), date("join_date", day(2014, 2023)),
            category("email_domain", pick("mail.org", "inbox.net", "post.com"), null=0.2),
        )),
        Table("loans", "loan", 280, (
            key("loan_id"), ref("book_id", "books"), ref("member_id", "members"), ref("branch_id", "branches"),
            date("loan_date", day(2021, 2024)), date("return_date", later("loan_date", 2, 60), null=0.25),
            measure("late_fee", amount(0.5, 18), null=0.5), measure("renewal_count", integer(0, 3), "INTEGER"),
        )),
    ),
)  # fmt: skip
