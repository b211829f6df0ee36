"""A museum: galleries, artworks, exhibitions, tickets, donors and their donations."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import COUNTRIES, amount, day, integer, later, listed, person, pick, title

MUSEUM = Domain(
    "museum",
    (
        Table("galleries", "gallery", 20, (
            key("gallery_id"), label("gallery_name", listed(*(f"{name} Gallery" for name in (
                "Amber", "Ivory", "Cobalt", "Scarlet", "Emerald", "Onyx", "Pearl", "Saffron", "Indigo", "Copper", "Marble",
                "Coral", "Slate", "Jade", "Bronze", "Crystal", "Ebony", "Topaz", "Opal", "Ruby", "Garnet", "Quartz")))),
            category("wing", pick("north", "south", "west")), level("floor", integer(0, 4)),
            measure("floor_area", integer(40, 620), "INTEGER"),
        )),
        Table("artworks", "artwork", 140, (
            key("artwork_id"), label("artwork_title", title(
                "Sleeping Weeping Dancing Standing Kneeling Laughing Bathing Resting Praying Wandering Dreaming Singing",
                "Shepherd Dancer Fisherman Child Horse Saint Merchant Widow Soldier Scholar Musician Gardener Bride")),
            ref("gallery_id", "galleries"), category("style", pick("baroque", "modern", "gothic", "impressionist", "abstract")),
            level("creation_year", integer(1420, 2015), null=0.1), measure("insured_value", amount(900, 840000, 0), null=0.12),
        )),
        Table("exhibitions", "exhibition", 45, (
            key("exhibition_id"), label("exhibition_name", title(
                "Light Shadow Memory Color Stone Water Fire Silence", "Stories Visions Journeys Dialogues Fragments Echoes")),
            ref("gallery_id", "galleries"), category("theme", pick("nature", "war", "portraits", "cities")),
            date("opening_date", day(2019, 2024)), date("closing_date", later("opening_date", 20, 150), null=0.2),
        )),
        Table("tickets", "ticket", 280, (
            key("ticket_id"), ref("exhibition_id", "exhibitions"), category("ticket_type", pick("adult", "student", "family",
                                                                                               "senior")),
            measure("ticket_price", amount(4, 38)), date("visit_date", day(2020, 2024)),
        )),
        Table("donors", "donor", 60, (
            key("donor_id"), label("donor_name", person()), category("donor_country", pick(*COUNTRIES[:5])),
            category("donor_type", pick("individual", "foundation", "company")),
        )),
        Table("donations", "donation", 160, (
            key("donation_id"), ref("donor_id", "donors"), measure("donation_amount", amount(50, 60000, 0)),
            date("donation_date", day(2017, 2024)), category("purpose", pick("restoration", "education", "acquisition"), null=0.2),
        )),
    ),
)  # fmt: skip
