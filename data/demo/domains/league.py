"""A sports league: stadiums, teams, players, matches between two teams, and injuries."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, COUNTRIES, amount, day, integer, person, pick, title

LEAGUE = Domain(
    "league",
    (
        Table("stadiums", "stadium", 22, (
            key("stadium_id"), label("stadium_name", title("Victory Union Riverside Central Memorial Olympic Liberty",
                                                           "Park Arena Ground Dome")),
            category("city", pick(*CITIES)), measure("capacity", integer(4000, 78000), "INTEGER"),
            category("surface", pick("grass", "hybrid", "artificial")),
        )),
        Table("teams", "team", 24, (
            key("team_id"), label("team_name", title("Red Iron Royal Coastal United Young Thunder",
                                                     "Lions Hawks Wolves Bulls Sharks Rovers")),
            ref("stadium_id", "stadiums"), category("division", pick("first", "second", "third")),
            level("founded_year", integer(1889, 2005)), measure("budget", amount(2, 95, 1)),
        )),
        Table("players", "player", 180, (
            key("player_id"), label("player_name", person()), ref("team_id", "teams"),
            category("position", pick("midfielder", "defender", "forward", "goalkeeper")),
            category("nationality", pick(*COUNTRIES[:6])), level("age", integer(17, 38)),
            measure("market_value", amount(0.2, 60, 1)), date("contract_end_date", day(2024, 2029), null=0.15),
        )),
        Table("matches", "match", 160, (
            key("match_id"), ref("home_team_id", "teams", "home team"), ref("away_team_id", "teams", "away team"),
            date("match_date", day(2021, 2024)), measure("home_score", integer(0, 5), "INTEGER"),
            measure("away_score", integer(0, 4), "INTEGER"), measure("attendance", integer(900, 52000), "INTEGER", null=0.1),
        )),
        Table("injuries", "injury", 90, (
            key("injury_id"), ref("player_id", "players"), category("body_part", pick("knee", "ankle", "shoulder", "head")),
            category("severity", pick("minor", "moderate", "severe")), date("injury_date", day(2021, 2024)),
            measure("recovery_time", integer(2, 210), "INTEGER", null=0.2),
        )),
    ),
)  # fmt: skip
